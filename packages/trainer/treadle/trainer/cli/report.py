"""`treadle report RUN`: the report of a run, made again from its records."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.cli.console import fail, say

__all__ = ["main"]


class ReportError(RuntimeError):
    """The report cannot be made; the message names the cause, the value and the fix."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle report",
        description="Writes report.html and curves.png of a run that still trains, ended or was "
        "killed, from what its directory holds by now.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the page alone, to this file; without it, to report.html and curves.png in RUN",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    from treadle.trainer.report import read_status, write_page, write_reports

    args = _parser().parse_args(argv)
    out = args.out or args.run / "report.html"
    try:
        if not any((args.run / name).is_file() for name in ("status.json", "metrics.jsonl")):
            raise ReportError(
                f"{args.run} is not a run directory: status.json and metrics.jsonl are missing"
            )
        if out.is_dir():
            raise ReportError(f"{out} is a directory: name a file, as {out / 'report.html'}")
        out.parent.mkdir(parents=True, exist_ok=True)
        summary = write_reports(args.run) if args.out is None else write_page(args.run, out)
        state = read_status(args.run).state
    except (ReportError, ValueError) as error:
        return fail(error)
    except OSError as error:
        where = error.filename or out
        return fail(ReportError(f"cannot make {out}: {where}: {error.strerror or error}"), status=1)
    steps = f"{summary.num_steps} step{'' if summary.num_steps == 1 else 's'}"
    say(f"wrote {out}: {steps}, {'state not recorded' if state == 'unknown' else state}")
    return 0
