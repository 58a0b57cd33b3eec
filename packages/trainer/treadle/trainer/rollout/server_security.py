"""How the trainer connects to its rollout servers: with a token, and with TLS between hosts.

Invariants: servers that a run starts take calls from this run only, also on loopback, unless the
user opened them to the network. Only file names travel between the run's processes. Each process
reads the secrets itself, so the files must be on every node. Those that the run makes are brought
there by its launcher.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.agent_loop.run_certificate import SERVER_NAME
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.run_tls import RunTls, write_private

__all__ = [
    "TOKEN_FILE",
    "forget_own_token",
    "needs_own_token",
    "server_security",
    "with_own_secrets",
]

TOKEN_FILE = "server_token"
"""Name of the file in the run directory with the token of a run's servers, while it runs."""


def server_security(config: RolloutConfig) -> ServerSecurity:
    """Returns the client's side of the servers' configuration."""
    return ServerSecurity(
        tls=config.tls_certificate is not None or config.tls_roots is not None,
        roots=config.tls_roots,
        server_name=config.tls_server_name,
        token=config.token_file,
    )


def needs_own_token(config: Config) -> bool:
    """Returns whether `with_own_secrets` gives the run's servers a token."""
    rollout = config.rollout
    secured = rollout.token_file is not None or rollout.tls_certificate is not None
    secured |= bool(rollout.addresses)  # they do not know it
    return not secured and not getattr(config.launch, "allow_plaintext_on_network", False)


@contextmanager
def with_own_secrets(config: Config, run_dir: Path, tls: RunTls | None) -> Iterator[Config]:
    """Yields the configuration with what secures the run's servers; afterwards the token is gone.

    Without a token, any user of this machine could sample from the servers and change their
    weights. On several hosts, servers that have no certificate of the user's get the run's. A
    configuration that secures its servers itself, or opens them to the network without TLS, is
    yielded as it is.

    Args:
        run_dir: Exists; the token's file there can be read by the present user only.
        tls: The run's certificates, as the launcher has them. The token's file is then beside them,
            so that it comes to every node with them.
    """
    update: dict[str, object] = {}
    if tls is not None and _has_no_tls(config.rollout):
        update = {
            "tls_certificate": tls.certificate,
            "tls_key": tls.key,
            "tls_roots": tls.roots,
            "tls_server_name": SERVER_NAME,
        }
    path = (run_dir.resolve() if tls is None else tls.directory) / TOKEN_FILE
    if needs_own_token(config):
        path.unlink(missing_ok=True)  # of a run that was killed
        write_private(path, secrets.token_urlsafe(32).encode())
        update["token_file"] = path
    if not update:
        yield config
        return
    try:
        yield config.model_copy(update={"rollout": config.rollout.model_copy(update=update)})
    finally:
        if "token_file" in update:
            path.unlink(missing_ok=True)


def forget_own_token(run_dir: Path) -> None:
    """Removes the token of an attempt that was killed, where no further one has servers."""
    (run_dir / TOKEN_FILE).unlink(missing_ok=True)


def _has_no_tls(rollout: RolloutConfig) -> bool:
    given = rollout.tls_certificate is not None or rollout.tls_roots is not None
    return not given and not rollout.addresses  # those have other certificates, or none
