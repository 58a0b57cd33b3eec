r"""Tasks that need code, small enough for a model of one million parameters, in ReTool's formats.

    python examples/retool/tiny_tasks.py --output DIR

writes `sft_train.jsonl` and `sft_val.jsonl` for `treadle sft`, and `train.jsonl`, `val.jsonl` and
`hard.jsonl` for reinforcement. Each is made in the form in which ReTool-SFT or DAPO-Math-17k is
published, and converted by what `treadle data` converts those with.

Three kinds of task: the product of three numbers, counting by a remainder, and the simulation of a
recurrence. The conversations have habits that reinforcement is to change: `_GUESSES` of them box a
number of the question without running code, and the others run their code again with probability
`_AGAIN`. The tasks of `hard.jsonl` are products of numbers with seven digits, which the model
copies wrongly into its code.

Invariant: a task is a pure function of the random generator, no question is in two files, and the
output of a conversation's program is what the program prints.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from treadle.trainer.prepare import boxed_math, retool_sft

__all__ = ["KINDS", "Task", "data_files", "hard_product", "main", "published_conversation"]

_GUESSES: Final = 0.5
_AGAIN: Final = 0.3
_NUM_ROWS: Final = {"sft_train": 8000, "sft_val": 64, "train": 800, "val": 96, "hard": 400}

# What ReTool-SFT has before the question, shortened; the converter drops it.
_PREAMBLE: Final = "Solve the following problem step by step.\n*user question:*\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A question, the program that answers it, what the program prints, and a hasty answer."""

    question: str
    code: str
    answer: str
    guess: str


def product(rng: random.Random) -> Task:
    """Returns the product of three numbers: 37 * 48 * 5."""
    a, b, c = rng.randint(11, 99), rng.randint(11, 99), rng.randint(2, 9)
    return _product(a, b, c)


def hard_product(rng: random.Random) -> Task:
    """Returns the product of two numbers with seven digits."""
    return _product(rng.randint(10**6, 10**7 - 1), rng.randint(10**6, 10**7 - 1))


def _product(*factors: int) -> Task:
    value = 1
    for factor in factors:
        value *= factor
    return Task(
        question=f"What is {' * '.join(map(str, factors))}?",
        code="*".join(map(str, factors)),
        answer=str(value),
        guess=str(factors[0]),
    )


def counting(rng: random.Random) -> Task:
    """Returns how many numbers have some remainder."""
    end, divisor = rng.randint(20, 99), rng.randint(3, 9)
    rest = rng.randrange(divisor)
    return Task(
        question=f"How many numbers below {end} have the rest {rest} by {divisor}?",
        code=f"sum(n % {divisor} == {rest} for n in range({end}))",
        answer=str(sum(n % divisor == rest for n in range(end))),
        guess=str(divisor),
    )


def simulation(rng: random.Random) -> Task:
    """Returns where a linear recurrence ends."""
    start, times, modulus = rng.randint(1, 9), rng.randint(11, 30), rng.randint(31, 99)
    factor, added = rng.randint(2, 9), rng.randint(1, 9)
    x = start
    for _ in range(times):
        x = (x * factor + added) % modulus
    return Task(
        question=f"x is {start}. {times} times, x = (x * {factor} + {added}) % {modulus}. "
        "What is x?",
        code=f"x = {start}\nfor n in range({times}): x = (x * {factor} + {added}) % {modulus}\nx",
        answer=str(x),
        guess=str(start),
    )


KINDS: Final[Sequence[Callable[[random.Random], Task]]] = (product, counting, simulation)
"""The kinds that the model can learn; they take turns."""


def published_conversation(task: Task, *, runs: int) -> dict[str, object]:
    r"""Returns a row as ReTool-SFT is published.

    Args:
        task: What is asked.
        runs: How often its program is run before the answer; with 0 the answer is the guess.
    """
    answer_format = boxed_math.FORMAT.replace("\\boxed", "<answer>\\boxed") + "</answer>"
    ran = f"<code>\n```python\n{task.code}\n```\n</code>"
    ran += f"<interpreter>\n{task.answer}\n</interpreter>\n"
    value = task.answer if runs else task.guess
    return {
        "messages": [
            {"role": "user", "content": f"{_PREAMBLE}{task.question}{answer_format}"},
            {"role": "assistant", "content": f"{ran * runs}<answer>\\boxed{{{value}}}</answer>"},
        ]
    }


def published_problem(task: Task, *, index: int) -> dict[str, object]:
    """Returns a row as DAPO-Math-17k is published."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": task.question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": task.answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(index)},
    }


def data_files(*, seed: int, num_rows: Mapping[str, int]) -> dict[str, list[dict[str, object]]]:
    """Returns the rows of each file, by its name without ending.

    Args:
        seed: Of all tasks and habits.
        num_rows: By the name of the file.
    """
    rng = random.Random(seed)
    seen: set[str] = set()
    files = {}
    # The held-out files first, so that they do not depend on the size of the others.
    for name in sorted(num_rows, key=lambda name: not name.endswith("val")):
        kinds = (hard_product,) if name == "hard" else KINDS
        tasks = [_new(rng, kinds[i % len(kinds)], seen) for i in range(num_rows[name])]
        make = _conversation if name.startswith("sft") else _problem
        files[name] = [make(task, rng, name, index) for index, task in enumerate(tasks)]
    return files


def _new(rng: random.Random, kind: Callable[[random.Random], Task], seen: set[str]) -> Task:
    while True:
        task = kind(rng)
        if task.question not in seen:
            seen.add(task.question)
            return task


def _conversation(task: Task, rng: random.Random, name: str, index: int) -> dict[str, object]:
    runs = 0
    if rng.random() >= _GUESSES:
        runs = 1
        while rng.random() < _AGAIN and runs < 4:
            runs += 1
    row = retool_sft.make_row(published_conversation(task, runs=runs), split=name, index=index)
    # The converter strips outputs, as verl's does. The sandbox ends them with a newline, and so
    # small a model copies an output only from where it has learned to find it.
    messages = cast("list[dict[str, object]]", row["messages"])
    for message in messages:
        if message["role"] == "tool":
            message["content"] = f"{task.answer}\n"
    return row


def _problem(task: Task, rng: random.Random, name: str, index: int) -> dict[str, object]:
    return boxed_math.dapo_row(published_problem(task, index=index), split=name, index=index)


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = [f"{json.dumps(row)}\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(lines)} rows\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the tasks of the tiny run.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks")
    arguments = parser.parse_args(argv)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, rows in data_files(seed=arguments.seed, num_rows=_NUM_ROWS).items():
        _write(arguments.output / f"{name}.jsonl", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
