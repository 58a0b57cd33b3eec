"""The HTTP server: an endpoint on a socket, in the event loop of its first user.

Invariant: it runs from the arrival of its first user until its last user leaves; then its socket
is closed and its only task has ended. It installs no signal handlers.

The last user waits for the server's end.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from treadle.agent_loop.aio import run_shielded
from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.loopback import is_loopback

_GRACE_S = 1  # for in-flight answers; uvicorn requires an integer
_STOP_S = 10.0
HEAD_S = 60.0
"""Seconds in which the head of a request must arrive."""


class HeadProtocol(H11Protocol):
    """HTTP/1.1 whose heads have limits of size (64 KiB, of h11; httptools has none) and of time.

    Invariant: no head is waited for longer than `HEAD_S`, from the connection's start or, on a
    connection that is kept alive, from the first byte after the last answer. Then the client gets
    a 408 and is disconnected.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]  # as uvicorn's
        self, transport: asyncio.Transport
    ) -> None:
        """Starts to wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Waits for a head until it is complete."""
        if self._waiting is None and not self._answering:
            self._wait()
        super().data_received(data)
        if self._answering:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def _answering(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first head.
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        text = f"the head of the request did not arrive in {HEAD_S:g} s; send it again, faster"
        self.transport.write(
            b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: text/plain\r\n"
            + f"content-length: {len(text)}\r\n\r\n{text}".encode()
        )
        self.transport.close()


class _Server(uvicorn.Server):
    """A server that leaves signals to its process, and waits for an event instead of polling."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The certificate that a server shows, and its key.

    Attributes:
        certificate: Certificate chain of the server, PEM.
        key: Private key of the server, PEM.
    """

    certificate: Path
    key: Path


class SharedServer:
    """An HTTP server that runs while it has users.

    Args:
        told_host: Host in the address that users get. None means `host`.
        port: 0 picks a free port.
        tls: Serves HTTPS with these; None means plain HTTP.
    """

    def __init__(
        self,
        app: Starlette,
        *,
        host: str,
        port: int,
        told_host: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._app = app
        self._host = host
        self._told_host = host if told_host is None else told_host
        self._port = port
        self._tls = tls
        self._lock = asyncio.Lock()
        self._users = 0
        self._address = ""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def __aenter__(self) -> str:
        """Starts the server if it is not running; returns its address as http(s)://host:port.

        Raises:
            SetupError: The address is taken or does not belong to this machine, or the
                certificate and the key cannot be used.
        """
        async with self._lock:
            if not self._users:
                self._start()
            self._users += 1
            return self._address

    async def __aexit__(self, *exc_info: object) -> None:
        await run_shielded(self._leave(), timeout_s=_STOP_S)

    def _start(self) -> None:
        config = uvicorn.Config(
            self._app,
            http=HeadProtocol,
            log_config=None,
            access_log=False,
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
            server_header=False,
            date_header=False,
            ssl_certfile=None if self._tls is None else self._tls.certificate,
            ssl_keyfile=None if self._tls is None else self._tls.key,
        )
        try:
            config.load()  # Here, because a server that fails to load ends its process.
        except OSError as error:  # An ssl.SSLError is one.
            raise SetupError(f"cannot serve with {self._tls}: {error}") from error
        listener = _listen(self._host, self._port)
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        host = f"[{self._told_host}]" if ":" in self._told_host else self._told_host
        scheme = "http" if self._tls is None else "https"
        self._address = f"{scheme}://{host}:{listener.getsockname()[1]}"

    async def _leave(self) -> None:
        async with self._lock:
            self._users -= 1
            if self._users:
                return
            assert self._server is not None and self._serving is not None
            self._server.stop.set()
            await self._serving


def check_exposure(host: str, *, tls: TlsFiles | None, allow: str, allowed: bool) -> None:
    """Refuses plain text beyond loopback, where every session's key could be read on the way.

    Args:
        allow: How the caller's user allows it.

    Raises:
        ValueError: The host is reachable from other machines, and neither is given.
    """
    if tls is None and not allowed and not is_loopback(host):
        raise ValueError(
            f"host {host!r} is reachable from other machines, and the keys of all sessions would "
            f"travel there in plain text: set the TLS certificate and key, listen on 127.0.0.1, or "
            f"{allow} on a network where you trust every machine"
        )


def _listen(host: str, port: int) -> socket.socket:
    """Listens before any user gets the address, so that no request comes too early."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, because asyncio sets TCP_NODELAY only then; without it an answer waits 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise SetupError(f"cannot listen on {host} port {port}: {error}") from error
    return listener
