"""Draws the rows: `train.parquet` and `test.parquet` with the column `images`.

    python -m visual_questions.preprocess --output visual_questions/data      (in examples/)

The same arguments write the same rows again. Test rows are other drawings than those of training.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow
from pyarrow import parquet

from visual_questions.shapes import Question, draw

__all__ = ["main", "make_rows"]

_SEEDS = {"train": 1, "test": 2}


def make_rows(split: str, count: int) -> list[dict[str, object]]:
    """Returns rows with one drawing each."""
    rng = random.Random(_SEEDS[split])
    return [_row(draw(rng), split, index) for index in range(count)]


def _row(question: Question, split: str, index: int) -> dict[str, object]:
    return {
        "data_source": "visual_questions",
        "prompt": [{"role": "user", "content": f"<image>{question.text}"}],
        "images": [{"bytes": question.png, "path": None}],
        "ability": "vision",
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"split": split, "index": index, "question": question.text},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes both files; returns 0."""
    parser = argparse.ArgumentParser(description="Draw shapes, and ask about them.")
    parser.add_argument("--output", type=Path, required=True, help="directory for the files")
    parser.add_argument("--train", type=int, default=2048, help="number of rows for training")
    parser.add_argument("--test", type=int, default=96, help="number of rows for validation")
    given = parser.parse_args(arguments)
    given.output.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", given.train), ("test", given.test)):
        table = pyarrow.Table.from_pylist(make_rows(split, count))
        parquet.write_table(table, given.output / f"{split}.parquet")
        sys.stdout.write(f"{given.output / split}.parquet: {count} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
