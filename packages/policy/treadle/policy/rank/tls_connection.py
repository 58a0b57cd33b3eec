"""A connection of `multiprocessing` through TLS.

`Connection` reads and writes a file descriptor, so it gets one end of a pair of sockets. A thread
carries bytes between the other end and the TLS socket. It alone uses the latter, since a TLS
socket may not be read and written by two threads at a time, as `Link` does with its connection.

Invariants: what was sent before `close` is carried on, until the other side has gone; `sent` waits
for it. The end of either side ends the other one. At most `_BLOCK` bytes per direction wait here.
"""

import os
import select
import socket
import ssl
import threading
from multiprocessing.connection import Connection
from typing import Any

from treadle.policy.rank.run_tls import SERVER_NAME, RunTls

__all__ = ["TlsConnection", "accepted", "connected"]

_BLOCK = 256 << 10
_HANDSHAKE_S = 30.0
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class TlsConnection(Connection):
    """The local end."""

    def __init__(self, secured: ssl.SSLSocket) -> None:
        """Args: secured: After its handshake; the connection becomes its owner."""
        near, far = socket.socketpair()
        super().__init__(near.detach())
        self._carrier = threading.Thread(
            target=_carry, args=(far, secured), name="tls", daemon=True
        )
        self._carrier.start()

    def sent(self, within_s: float) -> bool:
        """Waits until all is sent; needs `close` first. Returns whether it is."""
        self._carrier.join(within_s)
        return not self._carrier.is_alive()


def connected(host: str, port: int, tls: RunTls) -> TlsConnection:
    """Connects to a process of the run.

    Raises:
        OSError: Nobody answers there, or somebody who does not belong to the run.
    """
    plain = socket.create_connection((host, port), timeout=_HANDSHAKE_S)
    return _secured(plain, tls.client_context(), server_side=False)


def accepted(caller: "Connection[Any, Any]", context: ssl.SSLContext) -> TlsConnection:
    """Returns what a caller says through TLS; `caller` is closed.

    Raises:
        OSError: The caller does not belong to the run.
    """
    plain = socket.socket(fileno=os.dup(caller.fileno()))
    caller.close()
    return _secured(plain, context, server_side=True)


def _secured(plain: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> TlsConnection:
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.settimeout(_HANDSHAKE_S)
    try:
        secured = context.wrap_socket(
            plain, server_side=server_side, server_hostname=None if server_side else SERVER_NAME
        )
    except OSError:
        plain.close()
        raise
    return TlsConnection(secured)


def _carry(near: socket.socket, secured: ssl.SSLSocket) -> None:
    """Carries bytes both ways, until one side has ended and the other has what it said."""
    with near, secured:
        near.setblocking(False)
        secured.setblocking(False)
        to_send = to_give = b""
        heard = True  # whether the near side still takes what arrives
        while True:
            moved = False
            try:
                if not to_send and (said := _read(near)) is not None:
                    to_send, moved = said, True
                if to_send and (num_sent := _write(secured, to_send)):
                    to_send, moved = to_send[num_sent:], True
                if not to_give and (said := _read(secured)) is not None:
                    to_give, moved = said, True
            except OSError:
                return
            try:
                if to_give and (num_given := _write(near, to_give) if heard else len(to_give)):
                    to_give, moved = to_give[num_given:], True
            except OSError:  # closed, and what it said last may still be on its way
                heard = False
            if not moved:
                _wait(near, secured, sends=bool(to_send), gives=bool(to_give))


def _read(side: socket.socket) -> bytes | None:
    """Returns what has arrived; None if nothing has.

    Raises:
        OSError: The side has ended.
    """
    try:
        said = side.recv(_BLOCK)
    except _NOT_NOW:
        return None
    if not said:
        raise ConnectionResetError("the other end was closed")
    return said


def _write(side: socket.socket, waiting: bytes) -> int:
    """Returns how many bytes the side takes now.

    Raises:
        OSError: The side has ended.
    """
    try:
        return side.send(waiting)
    except _NOT_NOW:
        return 0


def _wait(near: socket.socket, secured: ssl.SSLSocket, *, sends: bool, gives: bool) -> None:
    """Waits until something can be carried.

    Args:
        near: One side.
        secured: The other one; it has nothing left that is decrypted.
        sends: Whether bytes wait for `secured`.
        gives: Whether bytes wait for `near`.
    """
    poller = select.poll()
    near_for = (0 if sends else select.POLLIN) | (select.POLLOUT if gives else 0)
    far_for = (0 if gives else select.POLLIN) | (select.POLLOUT if sends else 0)
    for side, wanted in ((near, near_for), (secured, far_for)):
        if wanted:  # else its end, which `poll` tells in any case, would wake nobody who can act
            poller.register(side, wanted)
    poller.poll()
