"""GSM8K as it is published -> training rows for the tool agent.

    python examples/gsm8k_tool_agent/preprocess.py --output examples/gsm8k_tool_agent/data

Downloads `openai/gsm8k` from the Hugging Face Hub, or reads its files in `--source`, and writes
`train` and `test` with the columns that verl's `examples/data_preprocess/gsm8k_tool_agent_loop.py`
gives: the question with an instruction, the tool's ground truth in `extra_info.tools_kwargs`, and
`agent_name`, without which the tool would never be called.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.trainer.data import DataError
from treadle.trainer.data import read_rows as read_published_rows
from treadle.trainer.problems import SeveralProblems

SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
INSTRUCTION = "Let's think step by step and output the final answer after `####`."
_HUB = "hf://datasets/openai/gsm8k/main"
_MARK = "#### "


def solution_of(answer: str) -> str | None:
    """Returns the number after the last `#### ` without thousands separators, or None."""
    _, mark, solution = answer.rpartition(_MARK)
    return solution.strip().replace(",", "") if mark else None


def make_row(
    question: str, answer: str, *, solution: str, split: str, index: int
) -> dict[str, object]:
    """Returns one training row."""
    asked = f"{question} {INSTRUCTION}"
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": asked},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": question,
            "need_tools_kwargs": True,
            "tools_kwargs": {
                "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": solution}},
            },
            "interaction_kwargs": {"query": asked, "ground_truth": solution},
        },
    }


def read_rows(file: Path, *, split: str) -> Iterator[dict[str, object]]:
    """Yields the rows of one published file, `.parquet` or `.jsonl`, here or on the Hub.

    Raises:
        DataError: It cannot be had, or a row is not a question with an answer that ends in
            `#### number`.
        SeveralProblems: More than one thing is wrong with its rows.
    """
    for row in read_published_rows([file], required=("question", "answer")):
        question, answer = str(row.columns["question"]), str(row.columns["answer"])
        solution = solution_of(answer)
        if solution is None:
            raise DataError(f"{row.place}: the answer has no {_MARK!r}")
        yield make_row(question, answer, solution=solution, split=split, index=row.index)


def file_of(split: str, source: Path | None) -> Path:
    """Returns the published file of a split: the only one in `source` of its name, or the Hub's.

    Raises:
        DataError: `source` has none, or several.
    """
    if source is None:
        return Path(f"{_HUB}/{split}-*.parquet")
    kinds = ("jsonl", "parquet")
    files = sorted(file for kind in kinds for file in source.glob(f"{split}*.{kind}"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise DataError(
            f"--source {source} must hold one file {split}*.jsonl or {split}*.parquet, has: {found}"
        )
    return files[0]


def write_rows(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Writes `rows` as `.jsonl` or `.parquet`, by the name of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        return
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts both splits; returns 0 on success."""
    parser = argparse.ArgumentParser(description="GSM8K -> training rows for the tool agent")
    parser.add_argument(
        "--source",
        type=Path,
        metavar="DIRECTORY",
        help="where train and test lie, .jsonl or .parquet (default: download them from the Hub)",
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    options = parser.parse_args(arguments)
    try:
        for split in ("train", "test"):
            rows = list(read_rows(file_of(split, options.source), split=split))
            target = options.output / f"{split}.{options.format}"
            write_rows(rows, target)
            sys.stdout.write(f"{target}: {len(rows)} rows\n")
    except (DataError, SeveralProblems, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
