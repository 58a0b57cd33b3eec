"""How a channel is opened: plain on this machine, TLS and a token beyond it.

Invariant: a bearer token never leaves the machine in plain text.
"""

import ipaddress
from dataclasses import dataclass

import grpc
import grpc.aio

from treadle.agent_loop.errors import SetupError

_OPTIONS = (
    # Retries and waits are ours (`retry`), visible and tested; gRPC's own would multiply them.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # A proxy from the environment must not come between us and a server on this machine.
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """How to speak to the servers.

    Attributes:
        tls: Encrypt. Required for a token unless the server is on this machine.
        root_certificates: PEM bytes; None: the system's.
        token: Sent as "authorization: Bearer ..." with every call; None: none.
    """

    tls: bool = False
    root_certificates: bytes | None = None
    token: str | None = None

    def open(self, address: str) -> grpc.aio.Channel:
        """Opens a channel; nothing is sent yet.

        Raises:
            SetupError: A token would travel in plain text.
        """
        if self.tls:
            credentials = grpc.ssl_channel_credentials(self.root_certificates)
            return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
        if self.token is not None and not _is_loopback(address):
            raise SetupError(
                f"the token for {address} would travel in plain text: set tls=True, or drop it"
            )
        return grpc.aio.insecure_channel(address, options=_OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Sent with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


def _is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
