"""What must hold for the processes and steps of a run, beyond the servers' command."""

import importlib.util

from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.data import DataError, PromptSet

__all__ = ["check_launcher", "check_rows_left"]


def check_launcher(config: Config) -> None:
    """Rejects a launcher whose library is not installed.

    Raises:
        ConfigError: It is not.
    """
    if config.launch.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError(
            'launch.kind=ray needs Ray, which is not installed: pip install "treadle-trainer[ray]"'
        )


def check_rows_left(config: Config, train: PromptSet) -> None:
    """Rejects a run of which fewer rows are left than one step takes.

    Raises:
        DataError: Too many prompts were too long.
    """
    left, needed = len(train.prompts), config.data.prompts_per_step
    if left < needed:
        raise DataError(
            f"data.prompts_per_step={needed} exceeds the {left} training rows that are left: "
            f"{train.notes[0]}. Lower it, or raise rollout.prompt_length"
        )
