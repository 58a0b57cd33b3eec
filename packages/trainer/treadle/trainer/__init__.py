"""Reinforcement learning of tool-using agents: the trainer and its command line.

The command line is `treadle.trainer.main`; `load_config` reads what it reads.
"""

from treadle.trainer.config.load import ConfigError, LoadedConfig, load_config
from treadle.trainer.config.schema import Config

__all__ = ["Config", "ConfigError", "LoadedConfig", "load_config"]
