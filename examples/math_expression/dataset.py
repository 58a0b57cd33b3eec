"""The data of the math expression demo: expressions with their values, in verl's row format.

Invariant: no expression is drawn twice, and the two splits share none, swapped sides included; a
row is a pure function of the seed and the ranges.

    python -m math_expression.dataset --out DIR --operators 1 4 --operands 1 9

Runs in one process.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from math_expression.demonstrations import (
    NUM_OPERATORS,
    OPERANDS,
    prompt,
    sample_split,
)
from math_expression.expression import Expression, evaluate, identity

__all__ = ["AGENT_NAME", "DATA_SOURCE", "dataset_rows", "main", "write_rows"]

DATA_SOURCE: Final = "treadle/math_expression"
AGENT_NAME: Final = "react_agent"
"""The agent loop of every row, by the name that `agent.loops` gives it."""

_MAX_FRUITLESS_DRAWS: Final = 10_000


def dataset_rows(
    *,
    num_train: int,
    num_val: int,
    seed: int,
    num_operators: tuple[int, int] = NUM_OPERATORS,
    operands: tuple[int, int] = OPERANDS,
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Makes the rows of both splits.

    Args:
        num_train: Rows to train on.
        num_val: Rows to validate on.
        seed: Of the expressions.
        num_operators: Fewest and most operators of an expression.
        operands: Smallest and largest number, from 0 on.

    Returns:
        Rows of the training and the validation split, with `data_source`, `agent_name`, `prompt`,
        `ability`, `reward_model` and `extra_info`.

    Raises:
        ValueError: A range is empty or begins too low, or holds fewer expressions than asked for.
    """
    _check("num_operators", num_operators, smallest=1)
    _check("operands", operands, smallest=0)
    rng = random.Random(seed)
    splits: list[list[dict[str, object]]] = []
    for split, num_rows in (("train", num_train), ("val", num_val)):
        drawn: dict[str, Expression] = {}
        fruitless = 0
        while len(drawn) < num_rows:
            expression = sample_split(
                rng, held_out=split == "val", num_operators=num_operators, operands=operands
            )
            before = len(drawn)
            drawn.setdefault(identity(expression), expression)
            fruitless = 0 if len(drawn) > before else fruitless + 1
            if fruitless == _MAX_FRUITLESS_DRAWS:
                raise ValueError(
                    f"{num_rows} rows are wanted in the {split} split, and no more than "
                    f"{len(drawn)} different expressions were found; widen the operators "
                    f"{num_operators} or the operands {operands}, or ask for fewer rows"
                )
        splits.append([_row(e, split, index) for index, e in enumerate(drawn.values())])
    return splits[0], splits[1]


def _row(expression: Expression, split: str, index: int) -> dict[str, object]:
    return {
        "data_source": DATA_SOURCE,
        "agent_name": AGENT_NAME,
        "prompt": [{"role": m.role, "content": m.content} for m in prompt(expression)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(evaluate(expression))},
        "extra_info": {"index": index, "split": split, "expression": str(expression)},
    }


def _check(name: str, bounds: tuple[int, int], *, smallest: int) -> None:
    if not smallest <= bounds[0] <= bounds[1]:
        raise ValueError(f"{name} is {bounds}; give a lower bound >= {smallest}, then an upper one")


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Writes one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make expressions with an operator @.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train and val.jsonl")
    parser.add_argument("--num-train", type=int, default=5000, help="rows to train on")
    parser.add_argument("--num-val", type=int, default=500, help="rows to validate on")
    parser.add_argument("--seed", type=int, default=1, help="of the expressions")
    for name, default in (("operators", NUM_OPERATORS), ("operands", OPERANDS)):
        parser.add_argument(f"--{name}", type=int, nargs=2, default=default, metavar=("MIN", "MAX"))
    arguments = parser.parse_args(argv)
    try:
        train, val = dataset_rows(
            num_train=arguments.num_train,
            num_val=arguments.num_val,
            seed=arguments.seed,
            num_operators=tuple(arguments.operators),
            operands=tuple(arguments.operands),
        )
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.out / "train.jsonl", train)
    write_rows(arguments.out / "val.jsonl", val)
    return 0


if __name__ == "__main__":
    sys.exit(main())
