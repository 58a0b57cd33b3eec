"""The connection between a rank or loop worker and its driver: the first caller with the run's key.

Invariants: a stranger who connects and says nothing, or something else, delays nobody. Each caller
is authenticated on a separate thread; no message is read before it is. In a run on several hosts
all of it goes through TLS, and both sides show a certificate of the run first.
"""

import argparse
import atexit
import faulthandler
import gc
import logging
import os
import queue
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from pathlib import Path
from typing import Any

from treadle.agent_loop.child_process import watch_parent, write_ready
from treadle.policy.rank.run_tls import RunTls
from treadle.policy.rank.tls_connection import TlsConnection, accepted, connected

__all__ = ["AUTHKEY_VARIABLE", "accept_driver", "connect_to_rank", "serve_driver", "tls_arguments"]

AUTHKEY_VARIABLE = "TREADLE_AUTHKEY"
"""Environment variable with the hexadecimal key of the connections between driver and workers."""
# Callers beyond these are turned away until one of them has answered or left.
_MAX_CALLERS = 64
_RETRY_S = 0.1
_FLUSH_S = 5.0


def _read_authkey() -> bytes:
    """Returns the key of the connections between driver and ranks, which the driver sets.

    Raises:
        RuntimeError: The process was not started by a driver.
    """
    key = os.environ.get(AUTHKEY_VARIABLE)
    if not key:
        raise RuntimeError(f"{AUTHKEY_VARIABLE} is not set: only the trainer starts policy ranks")
    return bytes.fromhex(key)


def accept_driver(
    listener: Listener, key: bytes, tls: RunTls | None = None
) -> "Connection[Any, Any]":
    """Waits for the driver and returns the connection to it.

    Args:
        listener: Without an own key: it would wait for each caller in turn.
        key: Of the run.
        tls: The run's certificates; None: in plain text.
    """
    context = None if tls is None else tls.server_context()
    found: queue.SimpleQueue[Connection[Any, Any]] = queue.SimpleQueue()
    slots = threading.BoundedSemaphore(_MAX_CALLERS)

    def authenticate(caller: "Connection[Any, Any]") -> None:
        try:
            if context is not None:
                caller = accepted(caller, context)
            deliver_challenge(caller, key)
            answer_challenge(caller, key)
        except (AuthenticationError, EOFError, OSError):
            caller.close()
        else:
            found.put(caller)
        finally:
            slots.release()

    def accept() -> None:
        while True:
            try:
                caller = listener.accept()
            except OSError:  # the listener was closed: the driver is here
                return
            if slots.acquire(blocking=False):
                threading.Thread(target=authenticate, args=(caller,), daemon=True).start()
            else:
                caller.close()

    threading.Thread(target=accept, name="accept", daemon=True).start()
    return found.get()


def connect_to_rank(
    host: str,
    port: int,
    key: bytes,
    *,
    deadline_s: float,
    given_up: threading.Event,
    tls: RunTls | None = None,
) -> "Connection[Any, Any]":
    """Connects the driver to a rank; tries again while strangers hold all of its slots.

    Args:
        host: Of the rank.
        port: Of the rank.
        key: Of the run.
        deadline_s: When to stop trying.
        given_up: Set when nobody waits any more, so that the thread ends.
        tls: The run's certificates; None: in plain text.

    Raises:
        AuthenticationError: Somebody else listens there.
        EOFError, OSError: The rank took no connection within `deadline_s`.
    """
    end = time.monotonic() + deadline_s
    while True:
        try:
            if tls is None:
                return Client((host, port), authkey=key)
            connection = connected(host, port, tls)
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            return connection
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationError(str(error)) from error
        except (EOFError, OSError):
            if time.monotonic() > end or given_up.wait(_RETRY_S):
                raise


def tls_arguments(tls: RunTls | None) -> tuple[str, ...]:
    """Returns what `serve_driver` must be given so that the driver can connect with `tls`."""
    return () if tls is None else ("--tls", str(tls.directory))


def serve_driver(
    argv: Sequence[str],
    *,
    module: str,
    serve: "Callable[[Connection[Any, Any], str, float], bool]",
) -> int:
    """The whole of a process that serves one driver; returns its exit status.

    It listens on its host and writes the address to its ready file.

    Args:
        argv: The arguments that the driver gives.
        module: What was started, for a message about them.
        serve: Is given the connection, the host and how often to give a sign of life, in seconds;
            returns whether all went well.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--host", required=True)
    parser.add_argument("--beat_s", type=float, required=True)
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--parent_pid", type=int, required=True)
    parser.add_argument("--ready_file", type=Path, required=True)
    args = parser.parse_args(argv)
    atexit.register(gc.freeze)  # Or Python looks for garbage once more, for 2 s.
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parent(args.parent_pid)
    with Listener((args.host, 0), backlog=64) as listener:
        address: tuple[str, int] = listener.address  # type: ignore[assignment]
        write_ready(args.ready_file, f"{address[0]}:{address[1]}")
        tls = None if args.tls is None else RunTls(args.tls)
        with accept_driver(listener, _read_authkey(), tls) as connection:
            went_well = serve(connection, args.host, args.beat_s)
        if isinstance(connection, TlsConnection):
            connection.sent(_FLUSH_S)  # the last answer, before the process ends
        return 0 if went_well else 1
