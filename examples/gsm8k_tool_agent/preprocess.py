"""GSM8K as it is published -> training rows for the tool agent.

    python preprocess.py --source DIRECTORY_WITH_TRAIN_AND_TEST_JSONL --output data

Reads `train.jsonl` and `test.jsonl`, one {"question", "answer"} a line, and writes `train` and
`test` with the columns that verl's `examples/data_preprocess/gsm8k_tool_agent_loop.py` gives: the
question with an instruction, the tool's ground truth in `extra_info.tools_kwargs`, and
`agent_name`, without which the tool would never be called.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    "You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
INSTRUCTION = "Let's think step by step and output the final answer after `####`."
_MARK = "#### "


class PreprocessError(ValueError):
    """The source is not GSM8K; the text names file and line."""


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


def read_rows(path: Path, *, split: str) -> Iterator[dict[str, object]]:
    """Yields the rows of one published file.

    Raises:
        PreprocessError: A line is not a question with an answer that ends in `#### number`.
        OSError: The file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        for index, line in enumerate(file):
            where = f"{path}, line {index + 1}"
            try:
                record = json.loads(line)
                question, answer = record["question"], record["answer"]
            except (ValueError, KeyError, TypeError) as error:
                raise PreprocessError(
                    f"{where}: not a question with an answer: {error!r}"
                ) from error
            solution = solution_of(answer)
            if solution is None:
                raise PreprocessError(f"{where}: the answer has no {_MARK!r}")
            yield make_row(question, answer, solution=solution, split=split, index=index)


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
        "--source", type=Path, required=True, help="directory of train.jsonl and test.jsonl"
    )
    parser.add_argument("--output", type=Path, required=True, help="directory to write to")
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    options = parser.parse_args(arguments)
    for split in ("train", "test"):
        try:
            rows = list(read_rows(options.source / f"{split}.jsonl", split=split))
        except (PreprocessError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        target = options.output / f"{split}.{options.format}"
        write_rows(rows, target)
        sys.stdout.write(f"{target}: {len(rows)} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
