"""Rewards: functions from a finished trajectory to a score.

`resolve` takes what a configuration says: nothing (each row by its `data_source`), a name, or
the path of your own function.
"""

from treadle.tools.rewards.lookup import check_data_sources, resolve
from treadle.tools.rewards.named import NAMED, name_for_source, sources, wrong_truth
from treadle.tools.rewards.user import from_function

__all__ = [
    "NAMED",
    "check_data_sources",
    "from_function",
    "name_for_source",
    "resolve",
    "sources",
    "wrong_truth",
]
