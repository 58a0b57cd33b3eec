"""Chooses the launcher of a run by its configuration."""

from pathlib import Path

from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.process import Launcher

__all__ = ["make_launcher"]


def make_launcher(config: AnyConfig, logs: Path) -> Launcher:
    """Returns the launcher that `launch.kind` names.

    Args:
        logs: Where the processes' logs go. Where Ray may place processes on several hosts, the
            certificates of the run are beside it, in `tls`.
    """
    launch = config.launch
    if launch.kind == "local":
        return LocalLauncher(logs)
    from treadle.trainer.launch.ray import RayLauncher

    encrypted = launch.address is not None and not launch.allow_plaintext_on_network
    return RayLauncher(launch, logs, tls_directory=logs.parent / "tls" if encrypted else None)
