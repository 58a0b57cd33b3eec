"""`treadle data NAME --output DIR`: a published data set -> rows that the trainer reads."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.cli.console import fail, say

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    from treadle.trainer.prepare.sets import SETS

    names = "\n".join(f"  {name:<17} {each.summary}" for name, each in SETS.items())
    parser = argparse.ArgumentParser(
        prog="treadle data",
        description="Converts a data set as it is published to rows with verl's columns.\n\n"
        f"data sets:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=tuple(SETS), metavar="NAME", help="one of those above")
    # The other names are those of verl's scripts.
    parser.add_argument(
        *("--output", "--local_dir", "--local_save_dir"),
        type=Path,
        required=True,
        metavar="DIR",
        help="directory to write to",
    )
    parser.add_argument(
        *("--from", "--local_dataset_path"),
        type=Path,
        dest="source",
        metavar="DIR",
        help="a copy of what is published (default: download it from the Hugging Face Hub)",
    )
    parser.add_argument("--format", choices=("parquet", "jsonl"), default="parquet")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N rows of each file")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    from treadle.trainer.data import DataError
    from treadle.trainer.prepare.convert import convert
    from treadle.trainer.prepare.sets import SETS
    from treadle.trainer.problems import SeveralProblems

    parser = _parser()
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit is {args.limit}: it must be at least 1")
    try:
        for written in convert(
            SETS[args.name],
            args.output.expanduser(),
            source=args.source,
            file_format=args.format,
            limit=args.limit,
        ):
            again = f"; {written.repeated} repeated ones left out" if written.repeated else ""
            say(f"{written.path}: {written.rows} rows{again}")
    except (DataError, SeveralProblems, OSError) as error:
        return fail(error)
    return 0
