"""How the trainer connects to its rollout servers: with a token, and with TLS between hosts.

Invariants: servers that a run starts take calls from this run only, also on loopback, unless the
user opened them to the network. Only file names travel between the run's processes. Each process
reads the secrets itself, so the files must be on every node.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from treadle.trainer.config.schema import Config, RolloutConfig

if TYPE_CHECKING:
    from treadle.agent_loop.rpc import ChannelSecurity

__all__ = ["TOKEN_FILE", "ServerSecurity", "needs_own_token", "with_own_token"]

TOKEN_FILE = "server_token"
"""Name of the file in the run directory with the token of a run's servers, while it runs."""


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
            tls=config.tls_certificate is not None or config.tls_roots is not None,
            roots=config.tls_roots,
            token=config.token_file,
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


def needs_own_token(config: Config) -> bool:
    """Returns whether `with_own_token` gives the run's servers a token."""
    rollout = config.rollout
    secured = rollout.token_file is not None or rollout.tls_certificate is not None
    secured |= bool(rollout.addresses)  # they do not know it
    return not secured and not getattr(config.launch, "allow_plaintext_on_network", False)


@contextmanager
def with_own_token(config: Config, run_dir: Path) -> Iterator[Config]:
    """Yields the configuration with a token of the run's own; afterwards its file is gone.

    Without one, any user of this machine could sample from the servers and change their weights.
    A configuration that secures its servers itself, or opens them to the network without TLS, is
    yielded as it is.

    Args:
        config: Of the run.
        run_dir: Exists; the token's file there can be read by the present user only.
    """
    if not needs_own_token(config):
        yield config
        return
    path = run_dir.resolve() / TOKEN_FILE
    path.unlink(missing_ok=True)  # of a run that was killed
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        own = config.rollout.model_copy(update={"token_file": path})
        yield config.model_copy(update={"rollout": own})
    finally:
        path.unlink(missing_ok=True)
