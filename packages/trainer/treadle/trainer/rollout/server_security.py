"""How the trainer connects to its rollout servers: plain, or with TLS and a token.

Invariant: only file names travel between the run's processes. Each process reads the secrets
itself, so the files must be on every node.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from treadle.trainer.config.schema import RolloutConfig

if TYPE_CHECKING:
    from treadle.agent_loop.rpc import ChannelSecurity

__all__ = ["ServerSecurity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """The client's files; picklable.

    Attributes:
        tls: Whether the servers use TLS.
        roots: PEM certificates that verify the servers'; None: the system's.
        token: File with the token; None: no token.
    """

    tls: bool = False
    roots: Path | None = None
    token: Path | None = None

    @classmethod
    def of(cls, config: RolloutConfig) -> Self:
        """Returns the client's side of the servers' configuration."""
        return cls(
            tls=config.tls_certificate is not None, roots=config.tls_roots, token=config.token_file
        )

    def read(self) -> "ChannelSecurity":
        """Reads the files; returns the settings of a channel.

        Raises:
            OSError: a file cannot be read.
        """
        from treadle.agent_loop.rpc import ChannelSecurity

        return ChannelSecurity(
            tls=self.tls,
            root_certificates=None if self.roots is None else self.roots.read_bytes(),
            token=None if self.token is None else self.token.read_text().strip(),
        )
