"""GSM8K's simple word problems, and SmolLM2 with a chat template that shows tools.

    python examples/smollm2_calculator/preprocess.py --model SMOLLM2 --output DIR

A problem is simple if its solution has one or two of GSM8K's annotations (`<<48/2=24>>`), all of
their numbers are whole and below 1000, each result is right, the second calculation uses the result
of the first once, the last result is the answer, and the question has at most 45 words. What is
left out is counted. The calculations are joined into one expression: 48/2 = 24 and 48+24 = 72 make
48+(48/2). Simple problems of even index in `train` become conversations for `treadle sft`, those of
odd index rows for reinforcement. Those of `test` are held out; a quarter of them measures the loss
of fine-tuning.

Invariant: no question is both imitated and reinforced, and none of either is held out.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from treadle.tools import load_catalogue
from treadle.tools.arithmetic import ArithmeticRefusal, evaluate, format_number
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.files import find_files, read_file
from treadle.trainer.demo import DEMO
from treadle.trainer.prepare.gsm8k import solution_of

__all__ = ["SYSTEM", "Problem", "conversation", "main", "prompt_row", "simple_problem"]

CATALOGUE: Final = DEMO.parent / "tools.yaml"
"""The calculator of the demo."""

SYSTEM: Final = "Use the calculator. End with #### and the number."

_HERE: Final = Path(__file__).parent
_HUB: Final = "hf://datasets/openai/gsm8k/main/{split}-*.parquet"
_MAX_WORDS: Final = 45
_ANNOTATION: Final = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
_NUMBER: Final = re.compile(r"\d*\.?\d+")
_SMALL: Final = re.compile(r"\d{1,3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A word problem, the expression that solves it, and the expression's value."""

    question: str
    expression: str
    answer: str


def simple_problem(columns: Mapping[str, object]) -> Problem | None:
    """Returns the problem of one row of GSM8K, or None if it is not simple."""
    question, solution = str(columns["question"]), str(columns["answer"])
    calculations = _ANNOTATION.findall(solution)
    if not 1 <= len(calculations) <= 2 or len(question.split()) > _MAX_WORDS:
        return None
    numbers = _NUMBER.findall(" ".join(text for pair in calculations for text in pair))
    if not all(_SMALL.fullmatch(number) for number in numbers):
        return None
    if not all(_value(expression) == value for expression, value in calculations):
        return None
    expression, answer = _joined(calculations)
    if _value(expression) != answer or answer != solution_of(solution):
        return None
    return Problem(question=question, expression=expression, answer=answer)


def _joined(calculations: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Returns one expression, empty if the first does not enter once, and its stated value."""
    if len(calculations) == 1:
        return calculations[0]
    (first, value), (second, answer) = calculations
    number = re.compile(rf"(?<!\d){value}(?!\d)")
    if len(number.findall(second)) != 1:
        return "", answer
    return number.sub(f"({first})", second), answer


def _value(expression: str) -> str | None:
    try:
        return format_number(evaluate(expression))
    except ArithmeticRefusal:
        return None


def conversation(problem: Problem) -> dict[str, object]:
    """Returns a row for `treadle sft`: a call of the calculator, its result, the answer."""
    tool = load_catalogue(CATALOGUE)["calculator"].spec
    function = {"name": tool.name, "arguments": json.dumps({"expression": problem.expression})}
    messages = [
        *_prompt(problem),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": problem.answer, "name": tool.name},
        {"role": "assistant", "content": f"#### {problem.answer}"},
    ]
    return {"messages": messages, "tools": [tool.as_schema()]}


def prompt_row(problem: Problem, *, split: str, index: int) -> dict[str, object]:
    """Returns a row for reinforcement or validation, with verl's columns."""
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": _prompt(problem),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {"split": split, "index": index},
    }


def _prompt(problem: Problem) -> list[dict[str, object]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": problem.question},
    ]


def _problems(path: Path) -> Iterator[tuple[int, Problem]]:
    """Yields the simple problems of a split with their index in it, and reports their number."""
    files = find_files(path)
    num_rows = num_simple = 0
    for file in files:
        for place, columns in read_file(file):
            if not {"question", "answer"} <= columns.keys():
                raise DataError(f"{place}: a row has question and answer, got {', '.join(columns)}")
            if (problem := simple_problem(columns)) is not None:
                yield num_rows, problem
                num_simple += 1
            num_rows += 1
    sys.stdout.write(f"{path}: {num_simple} of {num_rows} problems are simple\n")


def _write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    lines = [f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(lines)} rows\n")


def _write_model(source: Path, folder: Path) -> None:
    """Copies a model and gives it the chat template of this example."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    shutil.copy(_HERE / "chat_template.jinja", folder / "chat_template.jinja")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make the data and the model of this example.")
    for split in ("train", "test"):
        parser.add_argument(
            f"--{split}",
            type=Path,
            default=Path(_HUB.format(split=split)),
            metavar="FILE",
            help="GSM8K's rows as .jsonl or .parquet; from the Hugging Face Hub by default",
        )
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    try:
        train, test = (list(_problems(path)) for path in (arguments.train, arguments.test))
    except DataError as error:
        parser.error(str(error))
    output.mkdir(parents=True, exist_ok=True)
    _write(output / "sft_train.jsonl", (conversation(p) for i, p in train if i % 2 == 0))
    _write(output / "sft_val.jsonl", (conversation(p) for i, p in test if i % 4 == 0))
    _write(
        output / "train.jsonl",
        (prompt_row(p, split="train", index=i) for i, p in train if i % 2 == 1),
    )
    _write(output / "val.jsonl", (prompt_row(p, split="test", index=i) for i, p in test))
    _write_model(arguments.model, output / "model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
