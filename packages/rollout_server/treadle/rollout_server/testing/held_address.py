"""Addresses for servers that tests start again.

Invariant: while an address is held, the system gives its port to nobody who asks for any port.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_address() -> Iterator[str]:
    """Yields a loopback address, host:port, where a server can listen, also after another ended.

    A port that is drawn and let go, or that an ended server had, may be another process's before
    the server listens there.
    """
    with socket.socket() as held:
        # With this option, which servers set too, a socket that does not listen is not in the way.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
