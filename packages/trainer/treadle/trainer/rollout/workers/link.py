"""One end of the connection between the driver and a loop worker.

Invariants:

1. `send` never blocks: a thread writes. What waits there is bounded by the protocol: a worker gets
   at most the tasks that it asked for, and answers each once. A sender of more than that, as
   lines of a log, looks at `num_unsent` first.
2. Messages arrive in the order in which they were sent, on the event loop, until `on_end` is
   called, once.
3. With `beat_s`, a sign of life is sent whenever nothing else was for that time, also while the
   event loop stands still. So only a process that was stopped, or whose machine stands still, is
   silent.

Who waits: the writer for a message, or the next beat; the reader for the other end. Both end with
the connection, which `close` ends.
"""

import asyncio
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from treadle.policy.client.signs_of_life import sign_of_life

__all__ = ["Link"]


class Link:
    """Sends and receives messages; made on the event loop that `on_message` is called on.

    Args:
        connection: Authenticated; the link becomes its owner.
        on_message: Called with each message.
        on_end: Called when the other end is gone, the link was closed, or a message cannot be read;
            with what is wrong with the message, else None.
        beat_s: Seconds between signs of life; None sends none.
    """

    def __init__(
        self,
        connection: "Connection[Any, Any]",
        *,
        on_message: Callable[[Any], None],
        on_end: Callable[[str | None], None],
        beat_s: float | None = None,
    ) -> None:
        self._connection = connection
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._loop = asyncio.get_running_loop()
        self._main = threading.get_ident()
        self._on_message, self._on_end = on_message, on_end
        self._beat_s = beat_s
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="link writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="link reader", daemon=True).start()

    def send(self, message: object) -> None:
        """Sends a message; nothing happens if the other end is gone."""
        self._outgoing.put(pickle.dumps(message, protocol=5))

    @property
    def num_unsent(self) -> int:
        """Number of messages that wait for the other end to read."""
        return self._outgoing.qsize()

    def close(self, *, flushed_s: float = 0.0) -> None:
        """Ends the connection.

        Args:
            flushed_s: Maximum time in seconds to wait for the writer, which blocks the caller.
        """
        self._outgoing.put(None)
        if flushed_s:
            self._writer.join(flushed_s)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        problem = None
        with suppress(RuntimeError):  # the event loop has closed
            try:
                while True:
                    payload = self._connection.recv_bytes()
                    message = pickle.loads(payload)
                    self._loop.call_soon_threadsafe(self._on_message, message)
            except (EOFError, OSError):
                pass
            except (AttributeError, ImportError, pickle.UnpicklingError) as error:
                problem = f"sent what cannot be read here: {type(error).__name__}: {error}"
            self._outgoing.put(None)
            self._loop.call_soon_threadsafe(self._on_end, problem)

    def _write(self) -> None:
        while True:
            try:
                payload = self._outgoing.get(timeout=self._beat_s)
            except queue.Empty:
                payload = pickle.dumps(sign_of_life(self._main), protocol=5)
            if payload is None:
                return
            try:
                self._connection.send_bytes(payload)
            except OSError:  # the reader tells of it
                return
