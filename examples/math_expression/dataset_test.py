import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from math_expression.dataset import dataset_rows, main
from math_expression.expression import evaluate, identity, parse, steps


def _identity(row: Mapping[str, Any]) -> str:
    return identity(parse(row["extra_info"]["expression"]))


def test_a_row_asks_for_the_value_of_its_expression() -> None:
    (row,), _ = dataset_rows(num_train=1, num_val=0, seed=3)
    assert list(row) == [
        "data_source",
        "agent_name",
        "prompt",
        "ability",
        "reward_model",
        "extra_info",
    ]
    text = row["extra_info"]["expression"]  # type: ignore[index]
    assert row["prompt"][1] == {"role": "user", "content": f"Compute {text}."}  # type: ignore[index]
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(evaluate(parse(text)))}


def test_no_expression_comes_twice_in_or_over_the_splits() -> None:
    train, val = dataset_rows(num_train=800, num_val=200, seed=5)
    drawn = [_identity(row) for row in (*train, *val)]
    assert len(set(drawn)) == len(drawn) == 1000
    assert (train, val) == dataset_rows(num_train=800, num_val=200, seed=5)
    assert train != dataset_rows(num_train=800, num_val=200, seed=6)[0]


def test_the_ranges_are_kept() -> None:
    train, _ = dataset_rows(
        num_train=300, num_val=0, seed=1, num_operators=(3, 4), operands=(10, 99)
    )
    expressions = [parse(row["extra_info"]["expression"]) for row in train]  # type: ignore[index]
    assert {len(steps(expression)) for expression in expressions} == {3, 4}
    assert all(len(t) == 2 for e in expressions for t in str(e).split() if t.isdecimal())


def test_more_rows_than_there_are_expressions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"100 rows are wanted in the train split.*no more than \d+ different"
    ):
        dataset_rows(num_train=100, num_val=0, seed=1, num_operators=(1, 1), operands=(1, 3))


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"num_operators": (0, 2)}, r"num_operators is \(0, 2\); give a lower bound >= 1"),
        ({"num_operators": (3, 2)}, r"num_operators is \(3, 2\)"),
        ({"operands": (-1, 2)}, r"operands is \(-1, 2\); give a lower bound >= 0"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(
    ranges: dict[str, tuple[int, int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        dataset_rows(num_train=1, num_val=1, seed=1, **ranges)


def test_the_command_writes_both_files(tmp_path: Path) -> None:
    arguments = ["--num-train", "20", "--num-val", "5", "--operators", "1", "3"]
    assert main(["--out", str(tmp_path / "data"), *arguments]) == 0
    rows = [
        json.loads(line)
        for name in ("train.jsonl", "val.jsonl")
        for line in (tmp_path / "data" / name).read_text().splitlines()
    ]
    assert [row["extra_info"]["split"] for row in rows] == ["train"] * 20 + ["val"] * 5


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--operands", "5", "2"])
    assert "operands is (5, 2)" in capsys.readouterr().err
