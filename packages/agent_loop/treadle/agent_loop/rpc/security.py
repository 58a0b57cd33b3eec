"""Channel security: plain text on this machine, TLS and a token beyond it.

Invariant: a bearer token never leaves the machine in plain text, unless the user trusts the
network.
"""

from dataclasses import dataclass

import grpc
import grpc.aio

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.loopback import is_loopback

CONNECTING_OPTIONS = (
    # `retry` implements retries and waits; gRPC's own would multiply them.
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Despite its name, the time limit of one attempt to connect, TLS included: enough for a busy
    # or distant server.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    # A proxy from the environment must not come between us and a server on this machine.
    ("grpc.enable_http_proxy", 0),
)
CHANNEL_OPTIONS = (
    *CONNECTING_OPTIONS,
    # Without pings, a stream from a host that is gone would hang until its deadline. This project's
    # servers allow one ping every ten seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # the option that gRPC 1.85 uses
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """Encryption and authentication of the channels to the servers.

    Attributes:
        tls: Whether to encrypt. A token requires it unless the server is on this machine.
        root_certificates: PEM bytes; None means the system's.
        server_name: The name that a server's certificate must have; None means that of its host.
        token: Sent as "authorization: Bearer ..." with every call; None means no token.
        trusts_network: Whether the token may leave this machine in plain text.
        options: Options of gRPC's channels, beside those of TLS.
    """

    tls: bool = False
    root_certificates: bytes | None = None
    server_name: str | None = None
    token: str | None = None
    trusts_network: bool = False
    options: tuple[tuple[str, int], ...] = CHANNEL_OPTIONS

    def open(self, address: str) -> grpc.aio.Channel:
        """Opens a channel; nothing is sent yet.

        Raises:
            SetupError: A token would travel in plain text.
        """
        if self.tls:
            return grpc.aio.secure_channel(address, self._credentials, options=self._tls_options)
        self._check_plain(address)
        return grpc.aio.insecure_channel(address, options=self.options)

    def open_blocking(self, address: str) -> grpc.Channel:
        """Opens a channel for blocking calls from threads; nothing is sent yet.

        Raises:
            SetupError: A token would travel in plain text.
        """
        if self.tls:
            return grpc.secure_channel(address, self._credentials, options=self._tls_options)
        self._check_plain(address)
        return grpc.insecure_channel(address, options=self.options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    @property
    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates)

    @property
    def _tls_options(self) -> tuple[tuple[str, int | str], ...]:
        if self.server_name is None:
            return self.options
        return (*self.options, ("grpc.ssl_target_name_override", self.server_name))

    def _check_plain(self, address: str) -> None:
        if self.token is not None and not self.trusts_network and not _is_loopback(address):
            raise SetupError(
                f"the token for {address} would travel in plain text: set tls=True, or drop it"
            )


def _is_loopback(address: str) -> bool:
    if address.startswith("unix:"):
        return True
    return is_loopback(address.rpartition(":")[0])
