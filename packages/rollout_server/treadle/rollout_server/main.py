"""The process: configuration, signals, ready file, exit; or `doctor`, which checks the host.

Invariant: the exit code is 0 only after a graceful shutdown; 2 if the configuration is invalid;
1 if it cannot be served, with one line that names the cause. The ready file exists exactly while
the server serves.

Who waits: the main task, for SIGTERM, SIGINT, or the end of the parent process. A second signal
does not shorten the shutdown, which takes at most `shutdown_grace_s`.
"""

import asyncio
import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from treadle.rollout_server.config.command_line import PROGRAM, ServerConfigError, parse
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.observability import logs
from treadle.tracing.child_process import write_ready

_log = logging.getLogger(__name__)
_PARENT_POLL_S = 1.0  # used where the kernel has no pidfd


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server, or the doctor; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["doctor"]:
        from treadle.rollout_server.doctor import command

        return command.main(words[1:])
    try:
        config = parse(words)
    except ServerConfigError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2
    logs.set_up(config.log_level, config.log_format)
    atexit.register(gc.freeze)  # Or Python looks for garbage once more: 2 s with an engine.
    # Imported late: --help does not need it. With gRPC a third faster than asyncio's own loop.
    import uvloop

    try:
        uvloop.run(_run(config))
    except (OSError, ValueError) as error:
        _log.critical("%s", error)
        return 1
    return 0


async def _run(config: ServerConfig) -> None:
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    with ExitStack() as stack:
        if config.parent_pid is not None:
            stack.enter_context(_watching(config.parent_pid, ending))
        serving = asyncio.create_task(_serve(config))
        ended = asyncio.create_task(ending.wait())
        # Cancelled, not asked to stop: a signal must also end the load of the engine.
        await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        serving.cancel()
        try:
            await serving
        except asyncio.CancelledError:
            _log.info("ended by a signal, or with the parent process")


async def _serve(config: ServerConfig) -> None:
    # Imported late: --help does not need gRPC.
    from treadle.rollout_server.server import serve

    async with serve(config) as server:
        with _ready_file(config.ready_file, server.address):
            await asyncio.Event().wait()


@contextmanager
def _ready_file(path: Path | None, address: str) -> Iterator[None]:
    """Creates the file atomically and removes it at the end."""
    if path is None:
        yield
        return
    write_ready(path, address)
    _log.info("ready: %s says %s", path, address)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _watching(pid: int, ending: asyncio.Event) -> Iterator[None]:
    """Sets `ending` when the process is gone; at once where the kernel has pidfd."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ending.set()
        yield
        return
    except (AttributeError, OSError):
        poll = loop.create_task(_poll(pid, ending))
        try:
            yield
        finally:
            poll.cancel()
        return
    try:
        loop.add_reader(descriptor, ending.set)
        yield
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _poll(pid: int, ending: asyncio.Event) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            _log.warning("parent process %d is gone", pid)
            ending.set()
            return
        await asyncio.sleep(_PARENT_POLL_S)
