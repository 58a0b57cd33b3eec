"""The router's state file: keeps its replicas across restarts.

Invariant: the file is complete at any time, and contains the replicas as of the last answered call
that changed them. It does not contain sessions, which clients open again by themselves.
"""

import json
import re
from pathlib import Path

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.rpc.router.session_queue import SessionQueue

_ADDRESS = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,16})?\])"
    r":(?P<port>[0-9]{1,5})"
)


def write_state(path: Path, queue: SessionQueue) -> None:
    """Writes the replicas; the file is replaced atomically."""
    router = queue.router
    state = {"replicas": list(router.addresses), "draining": sorted(router.draining)}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(state))
    partial.replace(path)


def read_state(path: Path, queue: SessionQueue) -> None:
    """Adds the replicas of a state file, if it exists.

    Raises:
        SetupError: The file cannot be read or parsed.
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
    """Returns the address.

    Raises:
        SetupError: The address is not host:port.
    """
    if not is_address(address):
        raise SetupError(f"replica {address!r} is not host:port, as 10.0.0.1:4000")
    return address


def is_address(address: object) -> bool:
    """Returns whether the value is host:port, with a name, an IPv4 or an IPv6 in brackets."""
    if not isinstance(address, str):
        return False
    match = _ADDRESS.fullmatch(address)
    return match is not None and 0 < int(match["port"]) < 65536
