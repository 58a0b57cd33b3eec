"""The router's process: command line, signals, ready file, shutdown.

    python -m treadle.agent_loop.rpc.router --address 127.0.0.1:5000 --replica 127.0.0.1:4000

Invariant: the exit code is 0 only after a graceful shutdown, 2 for invalid arguments, and 1 if the
router cannot serve; one line names the cause. The ready file exists exactly while the router
serves.

The main task waits for SIGTERM or SIGINT.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.loopback import is_loopback
from treadle.agent_loop.routing.placement import HashedSession, StickySession
from treadle.agent_loop.rpc.router.server import RouterConfig, serve_router
from treadle.tracing.inert import inert, log_inertly

_log = logging.getLogger("treadle.agent_loop.rpc.router")
_PROGRAM = "python -m treadle.agent_loop.rpc.router"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the router; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    log_inertly(arguments.log_level)
    try:
        config = _config(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        asyncio.run(_run(config, arguments.ready_file))
    except (SetupError, OSError, ValueError) as error:
        sys.stderr.write(inert(f"{_PROGRAM}: {error}\n"))
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = RouterConfig()
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Tells the agent-loop workers of many hosts which replica each session uses.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--address", default="127.0.0.1:0", help="host:port to listen on; port 0 picks one")
    add("--replica", action="append", default=[], help="host:port of a replica; repeatable")
    add("--margin", type=int, help="sessions above the least loaded that move a session; 8")
    add("--cache_tokens", type=int, help="tokens that each replica's prefix cache holds")
    add(
        "--deterministic",
        action="store_true",
        help="only the session's id and the replicas decide; excludes margin and cache_tokens",
    )
    add(
        "--lease_s",
        type=float,
        default=defaults.lease_s,
        help="drop sessions idle for longer",
    )
    add(
        "--valid_for_s",
        type=float,
        default=defaults.valid_for_s,
        help="lifetime of an answer",
    )
    add("--state_file", type=Path, help="keeps registered and draining replicas across restarts")
    add(
        "--tracing_jsonl", type=Path, help="file for the spans of calls whose callers record theirs"
    )
    add("--tracing_otlp", help="OpenTelemetry endpoint for them, as http://localhost:4318")
    add("--ready_file", type=Path, help='written when serving: {"address": ..., "pid": ...}')
    add("--tls_certificate", type=Path, help="PEM chain of the router")
    add("--tls_key", type=Path, help="PEM private key of the router")
    add("--token_file", type=Path, help="file with the bearer token that every call must carry")
    add(
        "--insecure_allow_plaintext_beyond_loopback",
        action="store_true",
        help="listen beyond loopback without TLS and token; anyone can then use it",
    )
    add("--log_level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO")
    return parser


def _config(arguments: argparse.Namespace) -> RouterConfig:
    """Returns the configuration.

    Raises:
        ValueError: An argument is invalid.
        OSError: A file cannot be read.
    """
    for name in ("lease_s", "valid_for_s"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ValueError(f"--{name} is {getattr(arguments, name)}; it must be 0 or more")
    if (arguments.tls_certificate is None) != (arguments.tls_key is None):
        raise ValueError("--tls_certificate and --tls_key go together: give both or neither")
    _check_exposure(arguments)
    tls = None
    if arguments.tls_certificate is not None:
        tls = (arguments.tls_key.read_bytes(), arguments.tls_certificate.read_bytes())
    token = None
    if arguments.token_file is not None:
        token = arguments.token_file.read_text().strip()
        if not token:
            raise ValueError(f"--token_file {arguments.token_file} is empty: write the token to it")
    return RouterConfig(
        address=arguments.address,
        policy=_policy(arguments),
        replicas=tuple(arguments.replica),
        lease_s=arguments.lease_s,
        valid_for_s=arguments.valid_for_s,
        state_file=arguments.state_file,
        tls=tls,
        token=token,
        tracing_jsonl=arguments.tracing_jsonl,
        tracing_otlp=arguments.tracing_otlp,
    )


def _policy(arguments: argparse.Namespace) -> StickySession | HashedSession:
    if arguments.deterministic:
        if arguments.margin is not None or arguments.cache_tokens is not None:
            raise ValueError(
                "--deterministic ignores loads: drop it, or drop --margin and --cache_tokens"
            )
        return HashedSession()
    if arguments.margin is None:
        return StickySession(cache_tokens=arguments.cache_tokens)
    return StickySession(margin=arguments.margin, cache_tokens=arguments.cache_tokens)


def _check_exposure(arguments: argparse.Namespace) -> None:
    host, colon, port = arguments.address.rpartition(":")
    if not host or not colon or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--address is {arguments.address!r}; expected host:port")
    missing = [
        f"--{name}"
        for name in ("tls_certificate", "tls_key", "token_file")
        if getattr(arguments, name) is None
    ]
    exposed = not arguments.insecure_allow_plaintext_beyond_loopback and not is_loopback(host)
    if missing and exposed:
        raise ValueError(
            f"--address {arguments.address} is reachable from other machines and "
            f"{', '.join(missing)} is not set: set it, listen on 127.0.0.1, or pass "
            "--insecure_allow_plaintext_beyond_loopback"
        )


async def _run(config: RouterConfig, ready_file: Path | None) -> None:
    ending = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.set)
    async with serve_router(config) as address:
        with _ready(ready_file, address):
            await ending.wait()


@contextmanager
def _ready(path: Path | None, address: str) -> Iterator[None]:
    """Creates the ready file atomically, and removes it at the end."""
    if path is None:
        yield
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"address": address, "pid": os.getpid()}))
    partial.replace(path)
    _log.info("ready: %s says %s", path, address)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
