"""How the trainer speaks to its rollout servers: plain, or with TLS and a token.

Invariant: what travels between our own processes are the names of files; secrets are read where
they are used, so the files have to be on every node.
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
    """Files of the client's side; picklable."""

    tls: bool = False
    roots: Path | None = None
    """PEM certificates that the servers' is checked against. None: the system's."""
    token: Path | None = None

    @classmethod
    def of(cls, config: RolloutConfig) -> Self:
        """What the servers of a run are started with."""
        return cls(
            tls=config.tls_certificate is not None, roots=config.tls_roots, token=config.token_file
        )

    def read(self) -> "ChannelSecurity":
        """The settings of a channel.

        Raises:
            OSError: a file cannot be read.
        """
        from treadle.agent_loop.rpc import ChannelSecurity

        return ChannelSecurity(
            tls=self.tls,
            root_certificates=None if self.roots is None else self.roots.read_bytes(),
            token=None if self.token is None else self.token.read_text().strip(),
        )
