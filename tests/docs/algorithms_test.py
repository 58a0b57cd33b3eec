"""The guide of docs/algorithms.md: its estimator, loaded and called as a run does."""

import re
from pathlib import Path

import numpy as np

from treadle.policy.algorithms.advantages import Outcomes
from treadle.policy.algorithms.estimators import NAMED, find_estimator
from treadle.policy.config.algorithm import AlgorithmConfig

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")


def test_the_guide_makes_an_estimator(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    found = find_estimator(AlgorithmConfig(advantage=f"{tmp_path / 'mine.py'}:median"))
    got = found(Outcomes.of([1.0, 0.0, 0.0, 5.0, 2.0, 3.0], "aaabbb"))
    assert isinstance(got, np.ndarray)
    assert got.tolist() == [1.0, 0.0, 0.0, 2.0, -1.0, 0.0]


def test_both_tables_have_every_estimator() -> None:
    formulas, rules = re.findall(r"\n\| name \|.*?\n\n", PAGE, re.DOTALL)
    for table in (formulas, rules):
        assert {name for name in NAMED if f"`{name}`" in table} == set(NAMED)
