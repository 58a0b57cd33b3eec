"""The router's state file: its replicas, kept over restarts.

Invariant: the file is whole at any time, and what it says is what the router knew when it last
answered a call that changed its replicas. Sessions are not in it: they come back by themselves.
"""

import json
from pathlib import Path

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.rpc.router.session_queue import SessionQueue


def write_state(path: Path, queue: SessionQueue) -> None:
    """Writes the replicas; the file is whole at any time."""
    router = queue.router
    state = {"replicas": list(router.addresses), "draining": sorted(router.draining)}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(state))
    partial.replace(path)


def read_state(path: Path, queue: SessionQueue) -> None:
    """Adds the replicas of a state file, if there is one.

    Raises:
        SetupError: It cannot be read as one.
    """
    try:
        state = json.loads(path.read_text())
        replicas, draining = state["replicas"], state["draining"]
        for address in replicas:
            queue.add(check_address(address))
        for address in draining:
            queue.drain(address)
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"the state file {path} cannot be read ({type(error).__name__}: {error}): remove it, "
            "and give the replicas again"
        ) from error


def check_address(address: str) -> str:
    """Returns it.

    Raises:
        SetupError: It is not host:port.
    """
    if not is_address(address):
        raise SetupError(f"replica {address!r} is not host:port, as 10.0.0.1:4000")
    return address


def is_address(address: object) -> bool:
    """Whether it is host:port."""
    if not isinstance(address, str):
        return False
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
