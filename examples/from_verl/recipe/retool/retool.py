"""What the DAPO command takes from recipe/retool/retool.py: the rows, and the reward.

`CustomRLHFDataset` is `data.custom_cls`: DAPO-Math-17k and AIME as they are published, with the
form of the answer and the tool agent. `treadle data dapo_math` and `treadle data aime` write the
same rows once. `compute_score` is `custom_reward_function`; `reward.name=retool` is the same
reward.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from treadle.tools.rewards.retool import score
from treadle.trainer.data.files import find_files, read_file
from treadle.trainer.prepare.boxed_math import aime_row, dapo_row

__all__ = ["CustomRLHFDataset", "compute_score"]

_AIME = {"AIME_2024": "aime_2024", "aime_2025": "aime_2025"}
"""Directories with a year of AIME, and the data source of their rows."""


class CustomRLHFDataset:
    """The rows of a directory; its name says which data set it is."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Mapping[str, object]]:
        """Yields the rows."""
        year = _AIME.get(self._path.name)
        make_row = dapo_row if year is None else aime_row
        index = 0
        for file in find_files(self._path):
            for _, columns in read_file(file):
                yield make_row(columns, split=year or "train", index=index)
                index += 1


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> float:
    """Returns 1 for a right answer, else min(0, -1 + 0.1 (num_turns - 2) / 2).

    `score(..., mode="flat")` is -1 for every wrong answer, and `mode="capped"` at most -0.5: a
    model cannot raise those by calling tools to no end.
    """
    return score(solution_str, ground_truth, num_turns=extra_info["num_turns"], mode="shaped")
