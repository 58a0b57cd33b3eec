"""How a client of rollout servers connects to them: with a token, and with TLS between hosts.

Invariant: only file names travel between processes. Each process reads the secrets itself, so the
files must be on every node.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.agent_loop.rpc import ChannelSecurity

__all__ = ["ServerSecurity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """The client's files.

    Attributes:
        tls: Whether the servers use TLS.
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
