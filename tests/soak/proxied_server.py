"""A rollout server behind a network that a soak disturbs: `python -m soak.proxied_server ARGS`.

The process becomes the server. A child of it forwards every connection, so that the driver, its
ranks and its clients see the proxy's address, and ends with the server, by the supervisor of both.

| the proxy gets | and |
|---|---|
| SIGUSR1 | cuts all connections: both sides see a reset |
| SIGUSR2 | delays what passes by `DELAY_S` per piece, for `DELAYED_S` |
| SIGSTOP | passes nothing, and keeps all connections open, until SIGCONT |
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main", "proxy_file"]

DELAY_S, DELAYED_S = 0.3, 4.0
_PIECE = 1 << 16
_POLL_S = 0.02
_READY = "--ready_file"


def proxy_file(ready: Path) -> Path:
    """Returns the file with the process id of the proxy of the server with this ready file."""
    return ready.with_suffix(".proxy")


class Proxy:
    """Forwards connections to one address.

    Args:
        host: Of the server.
        port: Of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._delayed_until = 0.0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection until a side closes it, or it is cut."""
        with contextlib.suppress(OSError):
            to_server = await asyncio.open_connection(self._host, self._port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, to_server[1]))
                tasks.create_task(self._pass(to_server[0], writer))
        writer.close()

    def cut(self) -> None:
        """Resets all connections."""
        for writer in self._writers:
            # Without this, a connection without unread data would be closed in good order.
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )
            writer.transport.abort()

    def delay(self) -> None:
        """Delays what passes, for some seconds."""
        self._delayed_until = asyncio.get_running_loop().time() + DELAYED_S

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while piece := await reader.read(_PIECE):
                if asyncio.get_running_loop().time() < self._delayed_until:
                    await asyncio.sleep(DELAY_S)
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass  # The other side is closed as well.
        finally:
            self._writers.discard(writer)
            writer.close()


async def _serve(real: Path, ready: Path, server: int) -> None:
    """Forwards for as long as the server is ready."""
    host, _, port = (await asyncio.to_thread(_address_in, real)).rpartition(":")
    proxy, loop = Proxy(host, int(port)), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, proxy.cut)
    loop.add_signal_handler(signal.SIGUSR2, proxy.delay)
    listening = await asyncio.start_server(proxy.forward, host, 0)
    address = f"{host}:{listening.sockets[0].getsockname()[1]}"
    await asyncio.to_thread(_announce_until_gone, real, ready, address, server)


def _address_in(real: Path) -> str:
    """Waits until the server is ready; returns its address."""
    while not real.exists():
        time.sleep(_POLL_S)
    return str(json.loads(real.read_text())["address"])


def _announce_until_gone(real: Path, ready: Path, address: str, server: int) -> None:
    """Shows the proxy's address as the server's, until the server is not ready any more."""
    proxy_file(ready).write_text(json.dumps({"pid": os.getpid(), "server": server}))
    partial = ready.with_suffix(".partial")
    partial.write_text(json.dumps({"address": address, "pid": server}))
    partial.replace(ready)
    while real.exists():
        time.sleep(_POLL_S)
    ready.unlink(missing_ok=True)


def main(argv: Sequence[str]) -> None:
    """Becomes the server with these arguments; with a ready file, behind a proxy."""
    arguments = list(argv)
    if _READY in arguments:
        place = arguments.index(_READY) + 1
        ready = Path(arguments[place])
        arguments[place] = str(ready.with_suffix(".real"))
        server = os.getpid()
        if not os.fork():
            asyncio.run(_serve(Path(arguments[place]), ready, server))
            os._exit(0)
    os.execv(sys.executable, [sys.executable, "-m", "treadle.rollout_server", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
