"""An address to listen on: host and port, and who can reach it."""

import ipaddress
import socket
from typing import NamedTuple, Self


class Address(NamedTuple):
    """A host, without brackets, and a port; port 0 picks a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses host:port.

        Raises:
            ValueError: The text is something else.
        """
        host, colon, port = text.rpartition(":")
        if not host or not colon or not port.isdecimal() or int(port) > 65535:
            raise ValueError(f"is {text!r}, expected host:port, as 127.0.0.1:0")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """The address family of a socket that listens on it.

        Raises:
            OSError: The host has no address.
        """
        return socket.getaddrinfo(*self, type=socket.SOCK_STREAM)[0][0]

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def why_not(self) -> str:
        """Returns why a server cannot listen on it, in the system's words; "" if it can."""
        try:
            family, kind, _, _, place = socket.getaddrinfo(*self, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:
                # A server that has just left the port does not block it.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
        except OSError as error:
            return error.strerror or str(error)
        return ""
