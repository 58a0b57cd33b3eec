"""Rewards: functions from a finished trajectory to a score.

`resolve` takes the reward of a configuration: nothing (each row by its `data_source`), a name, or
the path of your own function. `resolve_all` takes several.
"""

from treadle.tools.rewards.lookup import check_data_sources, resolve, resolve_all
from treadle.tools.rewards.named import NAMED, name_for_source, sources, wrong_truth
from treadle.tools.rewards.user import from_function, function_name
from treadle.tools.rewards.weighted import WeightedRewards, short_name, user_functions, weighed

__all__ = [
    "NAMED",
    "WeightedRewards",
    "check_data_sources",
    "from_function",
    "function_name",
    "name_for_source",
    "resolve",
    "resolve_all",
    "short_name",
    "sources",
    "user_functions",
    "weighed",
    "wrong_truth",
]
