"""The connection between a rank and its driver: the first caller that knows the run's key.

Invariant: a stranger who connects and says nothing, or something else, delays nobody. Each caller
is authenticated on a thread of its own; no message is read before it is.
"""

import queue
import threading
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any

__all__ = ["accept_driver", "connect_to_rank"]

# Callers beyond these are turned away until one of them has answered or left.
_MAX_CALLERS = 64
_RETRY_S = 0.1


def accept_driver(listener: Listener, key: bytes) -> "Connection[Any, Any]":
    """Waits for the driver and returns the connection to it.

    Args:
        listener: Without a key of its own, for it would wait for each caller in turn.
        key: Of the run.
    """
    found: queue.SimpleQueue[Connection[Any, Any]] = queue.SimpleQueue()
    places = threading.BoundedSemaphore(_MAX_CALLERS)

    def authenticate(caller: "Connection[Any, Any]") -> None:
        try:
            deliver_challenge(caller, key)
            answer_challenge(caller, key)
        except (AuthenticationError, EOFError, OSError):
            caller.close()
        else:
            found.put(caller)
        finally:
            places.release()

    def accept() -> None:
        while True:
            try:
                caller = listener.accept()
            except OSError:  # the listener was closed: the driver is here
                return
            if places.acquire(blocking=False):
                threading.Thread(target=authenticate, args=(caller,), daemon=True).start()
            else:
                caller.close()

    threading.Thread(target=accept, name="accept", daemon=True).start()
    return found.get()


def connect_to_rank(
    host: str, port: int, key: bytes, *, deadline_s: float, given_up: threading.Event
) -> "Connection[Any, Any]":
    """Connects the driver to a rank; tries again while strangers hold all of its places.

    Args:
        host: Of the rank.
        port: Of the rank.
        key: Of the run.
        deadline_s: When to stop trying.
        given_up: Set when nobody waits any more, so that the thread ends.

    Raises:
        AuthenticationError: Somebody else listens there.
        EOFError, OSError: The rank took no connection within `deadline_s`.
    """
    end = time.monotonic() + deadline_s
    while True:
        try:
            return Client((host, port), authkey=key)
        except (EOFError, OSError):
            if time.monotonic() > end or given_up.wait(_RETRY_S):
                raise
