"""Reinforcement learning of tool-using agents: `train` in Python, `treadle` on the command line.

Importing this module loads neither torch nor a tokenizer; `train` does.
"""

from treadle.trainer.api import TrainingResult, train
from treadle.trainer.config.load import ConfigError, LoadedConfig, load_config
from treadle.trainer.config.schema import Config

__all__ = ["Config", "ConfigError", "LoadedConfig", "TrainingResult", "load_config", "train"]
