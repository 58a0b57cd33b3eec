"""Writes the conversations of this example: the demo's questions, answered with the tool.

    python examples/sft/make_conversations.py --output examples/sft/data

The columns are verl's: `messages` as OpenAI's API has them, `tools` as function schemas.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.tools import load_catalogue
from treadle.tools.arithmetic import evaluate
from treadle.trainer.demo import DEMO

__all__ = ["conversations", "main"]

_NUM_ROWS = {"train": 192, "val": 32}


def conversations(split: str, count: int) -> Iterator[dict[str, object]]:
    """Yields conversations of full reward, one per question of the demo.

    Args:
        split: train or val.
        count: How many.
    """
    tool = load_catalogue(DEMO.parent / "tools.yaml")["calculator"].spec
    lines = (DEMO.parent / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    for row in map(json.loads, lines[:count]):
        yield {"messages": _messages(row, tool.name), "tools": [tool.as_schema()]}


def _messages(row: Mapping[str, Any], tool: str) -> list[dict[str, object]]:
    answer = row["reward_model"]["ground_truth"]
    expression = _expression(row["prompt"][-1]["content"], answer)
    call = {"name": tool, "arguments": json.dumps({"expression": expression})}
    return [
        *row["prompt"],
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call-0", "type": "function", "function": call}],
        },
        {"role": "tool", "content": answer, "tool_call_id": "call-0", "name": tool},
        {"role": "assistant", "content": f"#### {answer}"},
    ]


def _expression(question: str, answer: str) -> str:
    """Returns what was asked: the two numbers of the question, and the sign that fits."""
    numbers = re.findall(r"\d+", question)
    made = (f"{a}{sign}{b}" for a, b in (numbers, numbers[::-1]) for sign in "+-*")
    return next(text for text in made if str(evaluate(text)) == answer)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the conversations of this example.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    output: Path = parser.parse_args(argv).output
    output.mkdir(parents=True, exist_ok=True)
    for split, count in _NUM_ROWS.items():
        file = output / f"{split}.jsonl"
        lines = (f"{json.dumps(row)}\n" for row in conversations(split, count))
        file.write_text("".join(lines), encoding="utf-8")
        sys.stdout.write(f"{count} conversations in {file}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
