"""The process of the sandbox server: arguments, address, signals, end.

Invariant: exit code 0 after a graceful end, 1 with one line that names the cause if it cannot
serve, 2 for wrong arguments. It listens on 127.0.0.1 by default, and only after a program has run.
The ready file exists exactly while it serves.

Who waits: the main task, for SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Literal

import uvicorn

from treadle.agent_loop import SetupError
from treadle.agent_loop.proxy.server import HeadProtocol
from treadle.tools.sandbox.app import make_app
from treadle.tools.sandbox.limits import SandboxLimits
from treadle.tools.sandbox.local import LocalSandbox
from treadle.tracing.inert import inert, log_inertly

_log = logging.getLogger(__name__)
_PROGRAM = "python -m treadle.tools.sandbox"
_GRACE_S = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    arguments = _parser().parse_args(argv)
    log_inertly("INFO")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one descriptor per waiting client
    try:
        limits = {field.name: getattr(arguments, field.name) for field in fields(SandboxLimits)}
        sandbox = LocalSandbox(
            limits=SandboxLimits(**limits),
            places=arguments.places,
            queue=arguments.queue,
            warm=arguments.warm,
            packages=arguments.packages,
            preload=arguments.packages if arguments.preload is None else arguments.preload,
            cgroup=arguments.cgroup,
        )
        asyncio.run(_serve(sandbox, arguments))
    except (OSError, SetupError, ValueError) as error:
        sys.stderr.write(inert(f"{_PROGRAM}: {error}\n"))
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Runs programs isolated by bubblewrap, behind SandboxFusion's /run_code.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    names = _comma_separated
    parser.add_argument("--host", default="127.0.0.1", help="anyone who reaches it can run code")
    parser.add_argument("--port", type=int, default=8080, help="0: any that is free")
    parser.add_argument("--places", type=int, help="programs at one time; none: two per core")
    parser.add_argument("--queue", type=int, default=1024, help="programs that may wait")
    parser.add_argument("--warm", type=int, default=2, help="interpreters kept ready")
    parser.add_argument("--packages", type=names, default=("numpy", "sympy"), metavar="A,B")
    parser.add_argument("--preload", type=names, help="modules; none: as packages", metavar="A,B")
    parser.add_argument(
        "--cgroup",
        type=_cgroup,
        default="auto",
        metavar="auto|none|DIRECTORY",
        help="in which each program gets a cgroup: one below the server's own if it can be made, "
        "none, or one for this server alone",
    )
    for field in fields(SandboxLimits):
        kind = float if field.name.endswith("_s") else int
        parser.add_argument(f"--{field.name}", type=kind, default=field.default, help=" ")
    parser.add_argument("--ready_file", type=Path, help="gets the address while it serves")
    return parser


def _cgroup(text: str) -> Path | Literal["auto"] | None:
    match text:
        case "auto":
            return "auto"
        case "none":
            return None
    return Path(text)


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


async def _serve(sandbox: LocalSandbox, arguments: argparse.Namespace) -> None:
    with _listen(arguments.host, arguments.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://{host}:{port}"
        async with sandbox:
            config = uvicorn.Config(
                make_app(sandbox),
                http=HeadProtocol,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
            server = _Server(config)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, server.end)
            with _ready_file(arguments.ready_file, url):
                _log.info("ready: %s/run_code, %s", url, sandbox.stats())
                await server.serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    opened = socket.create_server((host, port), backlog=2048)
    # A socket that is made of its descriptor knows that its protocol is TCP. asyncio sets
    # TCP_NODELAY only then; without it an answer waits 40 ms.
    return socket.socket(fileno=opened.detach())


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again at the end, and exit with one."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Answers what is under way, at most `_GRACE_S`, and ends."""
        self.should_exit = True


@contextmanager
def _ready_file(path: Path | None, url: str) -> Iterator[None]:
    """The file appears whole and goes away at the end."""
    if path is None:
        yield
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    partial.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
