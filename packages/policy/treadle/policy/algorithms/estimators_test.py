import importlib.metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from treadle.agent_loop import SetupError
from treadle.policy.algorithms import estimators
from treadle.policy.algorithms.advantages import Outcomes
from treadle.policy.algorithms.estimators import AdvantageError, find_estimator
from treadle.policy.config.algorithm import AlgorithmConfig

TWO = Outcomes.of([1.0, 0.0], [0, 0], tokens=[[2], [1]])


def _named(reference: object) -> AlgorithmConfig:
    return AlgorithmConfig(advantage=str(reference))


def test_a_users_function_is_found_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def doubled(outcomes):\n    return [2 * r for r in outcomes.rewards_N]\n")
    found = find_estimator(_named(f"{file}:doubled"))(TWO)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [2.0, 0.0]


def test_an_installed_package_offers_estimators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    group = estimators.ENTRY_POINTS
    (info / "entry_points.txt").write_text(
        f"[{group}]\nhalf = mine_estimators:half\nno = nope:no\n"
    )
    (tmp_path / "mine_estimators.py").write_text(
        "def half(outcomes):\n    return outcomes.rewards_N / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = find_estimator(_named("half"))(TWO)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [0.5, 0.0]
    with pytest.raises(
        SetupError, match="cannot load the advantage estimator from the entry point"
    ):
        find_estimator(_named("no"))
    assert EntryPoint("half", "mine_estimators:half", group) in importlib.metadata.entry_points(
        group=group
    )


def test_an_unknown_name_lists_the_known_ones() -> None:
    known = "dr_grpo, gae, gpg, grpo, grpo_passk, maxrl, opo, .*remax, rloo"
    with pytest.raises(SetupError, match=rf"advantage=gpro: .*did you mean.*{known}"):
        find_estimator(_named("gpro"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "[1.0]",
            r"mine.py:f returned an array of shape \(1,\); .* per trajectory, that is \(2,\)",
        ),
        ("[1.0, float('nan')]", "returned nan for trajectory 1; it must be finite"),
        ("'abc'", "returned 'abc'; it must return one number per trajectory"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*mine.py:2, in f\)"),
        ("PerToken(outcomes.rewards_N)", r"per sampled token, that is \(3,\)"),
    ],
)
def test_what_cannot_be_trained_with_is_refused(body: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    imports = "from treadle.policy.algorithms.advantages import PerToken; "
    file.write_text(f"def f(outcomes):\n    {imports}return {body}\n")
    with pytest.raises(AdvantageError, match=message):
        find_estimator(_named(f"{file}:f"))(TWO)


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("f = 3\n")
    with pytest.raises(SetupError, match=r"mine\.py:f is 3, which is not a function"):
        find_estimator(_named(f"{tmp_path / 'mine.py'}:f"))
