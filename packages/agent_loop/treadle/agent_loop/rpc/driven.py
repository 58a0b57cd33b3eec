"""A program that one driver starts and commands over gRPC: a policy rank, a loop worker.

Invariants: only callers with the run's token are served (`token_guard`). A caller that is silent
delays nobody, and is cut off after `_SILENT_MS`. Between hosts everything goes through TLS, with
the run's certificate, which names `SERVER_NAME` instead of hosts.

    program = start_driven(sys.argv[1:], module="treadle.policy.rank")
    async with serve_driver(program, partial(add_RankServiceServicer_to_server, servicer)):
        await ended.wait()

The driver's side is `DrivenAccess`.
"""

import argparse
import atexit
import faulthandler
import gc
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from treadle.agent_loop.rpc.security import CONNECTING_OPTIONS, ChannelSecurity
from treadle.agent_loop.rpc.token_guard import BlockingTokenGuard, TokenGuard
from treadle.agent_loop.run_certificate import CERTIFICATE, KEY, ROOTS, SERVER_NAME
from treadle.tracing.child_process import write_ready
from treadle.tracing.inert import log_inertly

__all__ = [
    "TOKEN_VARIABLE",
    "DrivenAccess",
    "DrivenProgram",
    "serve_driver",
    "serve_driver_in_threads",
    "start_driven",
]

TOKEN_VARIABLE: Final = "TREADLE_RUN_TOKEN"
"""Environment variable with the token that the driver shows; only the same user can read it."""
_FLUSH_S = 5.0
"""Maximum time in which the last answers leave."""
_SILENT_MS = 10_000
_MAX_REQUEST_BYTES = 64 << 20
"""Of one message: what is larger travels in a stream."""
_NEVER_MS = (1 << 31) - 1
_OPTIONS = (
    # No pings: a process that stands still, as in a debugger, keeps its connection. Signs of life
    # say how long it may.
    ("grpc.keepalive_time_ms", _NEVER_MS),
    ("grpc.http2.ping_timeout_ms", _NEVER_MS),
    # The status of a failed call carries a traceback.
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.absolute_max_metadata_size", 1 << 20),
)
_THREADS = 4
"""One for the driver's stream, the others for strangers, who are refused at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenAccess:
    """The driver's side: how it starts its programs, and reaches them.

    Attributes:
        tls: Directory of the run's certificates, the same path on every node. None: in plain text,
            on this machine or where the user trusts the network.
    """

    tls: Path | None = None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What `start_driven` is given; `{host}` stands for the address of the program's node."""
        return ("--host", "{host}", *(() if self.tls is None else ("--tls", str(self.tls))))

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables of the programs."""
        return {TOKEN_VARIABLE: self.token}

    def channels(self) -> ChannelSecurity:
        """Returns how to open channels to the programs.

        Raises:
            OSError: The certificate cannot be read.
        """
        return ChannelSecurity(
            tls=self.tls is not None,
            root_certificates=None if self.tls is None else (self.tls / ROOTS).read_bytes(),
            server_name=SERVER_NAME,
            token=self.token,
            trusts_network=self.tls is None,
            options=(*CONNECTING_OPTIONS, *_OPTIONS, ("grpc.max_receive_message_length", -1)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenProgram:
    """How a program serves its driver.

    Attributes:
        tls: Directory of the run's certificates; None: in plain text.
        ready_file: Gets the address, once the program serves.
    """

    host: str
    token: str = field(repr=False)
    ready_file: Path
    tls: Path | None = None


def start_driven(argv: Sequence[str], *, module: str) -> DrivenProgram:
    """Prepares the process for its driver: logging, quick shutdown.

    Args:
        argv: The arguments that the driver gives.
        module: The started module, for a message about them.

    Raises:
        SystemExit: No driver started the process, or its arguments are wrong.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--host", required=True)
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--ready_file", type=Path, required=True)
    args = parser.parse_args(argv)
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        parser.error(f"{TOKEN_VARIABLE} is not set: only the trainer starts this program")
    atexit.register(gc.freeze)  # Or Python looks for garbage once more, for 2 s.
    faulthandler.enable()
    log_inertly("INFO")
    return DrivenProgram(host=args.host, token=token, ready_file=args.ready_file, tls=args.tls)


@asynccontextmanager
async def serve_driver(
    program: DrivenProgram, *add_services: Callable[[grpc.aio.Server], None]
) -> AsyncIterator[str]:
    """Serves while the block runs; yields the address, which is in the ready file then.

    At the end, the calls that still run have `_FLUSH_S` to send their last answers.

    Args:
        add_services: Each adds a servicer to the server.

    Raises:
        RuntimeError: The program cannot listen on its host.
        OSError: A certificate cannot be read.
    """
    server = grpc.aio.server(
        interceptors=(TokenGuard(program.token),),
        options=_server_options(max_bytes=_MAX_REQUEST_BYTES),
    )
    for add in add_services:
        add(server)
    address = f"{program.host}:{_bind(server, program)}"
    await server.start()
    write_ready(program.ready_file, address)
    try:
        yield address
    finally:
        await server.stop(_FLUSH_S)


@contextmanager
def serve_driver_in_threads(
    program: DrivenProgram, *add_services: Callable[[grpc.Server], None]
) -> Iterator[str]:
    """Serves as `serve_driver`, with threads, and messages of any size.

    For a program whose event loop runs code of a user, which may hold it for long.

    Args:
        add_services: Each adds a servicer to the server.

    Raises:
        RuntimeError: The program cannot listen on its host.
        OSError: A certificate cannot be read.
    """
    server = grpc.server(
        ThreadPoolExecutor(_THREADS, thread_name_prefix="serve driver"),
        interceptors=[BlockingTokenGuard(program.token)],
        # Nothing of a message is read before the token is checked.
        options=_server_options(max_bytes=-1),
    )
    for add in add_services:
        add(server)
    address = f"{program.host}:{_bind(server, program)}"
    server.start()
    write_ready(program.ready_file, address)
    try:
        yield address
    finally:
        server.stop(_FLUSH_S).wait()


def _server_options(*, max_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        *_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_bytes),
        # Until TLS and HTTP/2 are agreed on, and then without a call: the driver has one open.
        ("grpc.server_handshake_timeout_ms", _SILENT_MS),
        ("grpc.max_connection_idle_ms", _SILENT_MS),
    )


def _bind(server: grpc.aio.Server | grpc.Server, program: DrivenProgram) -> int:
    address = f"{program.host}:0"
    if program.tls is None:
        return server.add_insecure_port(address)
    pair = ((program.tls / KEY).read_bytes(), (program.tls / CERTIFICATE).read_bytes())
    return server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
