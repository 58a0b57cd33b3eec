"""Chooses the launcher of a run by its configuration."""

from pathlib import Path

from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.process import Launcher

__all__ = ["make_launcher"]


def make_launcher(config: AnyConfig, logs: Path) -> Launcher:
    """Returns the launcher that `launch.kind` names.

    Args:
        config: The run's configuration.
        logs: Where the processes' logs go.
    """
    launch = config.launch
    if launch.kind == "local":
        return LocalLauncher(logs)
    from treadle.trainer.launch.ray import RayLauncher

    return RayLauncher(launch, logs)
