"""How a client of rollout servers connects to them: with a token, and with TLS between hosts.

Invariant: only file names travel between processes. Each process reads the secrets itself, so the
files must be on every node.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.policy.v1 import weights_service_pb2 as pb

if TYPE_CHECKING:
    from treadle.agent_loop.rpc import ChannelSecurity

__all__ = ["ServerSecurity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """The client's files.

    Attributes:
        roots: PEM certificates that verify the servers'; None: the system's.
        server_name: The name in the servers' certificate; None: that of their host.
        token: File with the token; None: no token.
    """

    tls: bool = False
    roots: Path | None = None
    server_name: str | None = None
    token: Path | None = None

    def read(self) -> "ChannelSecurity":
        """Reads the files; returns the settings of a channel.

        Raises:
            OSError: A file cannot be read.
        """
        from treadle.agent_loop.rpc import ChannelSecurity

        return ChannelSecurity(
            tls=self.tls,
            root_certificates=None if self.roots is None else self.roots.read_bytes(),
            server_name=self.server_name,
            token=None if self.token is None else self.token.read_text().strip(),
        )

    def message(self) -> pb.ServerSecurity:
        """Returns what a rank is given."""
        return pb.ServerSecurity(
            tls=self.tls,
            roots="" if self.roots is None else str(self.roots),
            server_name=self.server_name or "",
            token_file="" if self.token is None else str(self.token),
        )

    @classmethod
    def of(cls, message: pb.ServerSecurity) -> "ServerSecurity":
        """Returns what a rank was given."""
        return cls(
            tls=message.tls,
            roots=Path(message.roots) if message.roots else None,
            server_name=message.server_name or None,
            token=Path(message.token_file) if message.token_file else None,
        )
