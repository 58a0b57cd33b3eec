"""Rewards: functions from a finished trajectory to a float.

`resolve` takes what a configuration says: nothing (each row by its `data_source`), a name, or
the place of a function of your own.
"""

from treadle.tools.rewards.lookup import (
    DATA_SOURCES,
    by_data_source,
    check_data_sources,
    get,
    resolve,
)
from treadle.tools.rewards.user import load

__all__ = ["DATA_SOURCES", "by_data_source", "check_data_sources", "get", "load", "resolve"]
