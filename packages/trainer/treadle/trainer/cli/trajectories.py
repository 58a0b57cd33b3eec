"""`treadle trajectories RUN`: the trajectories of a run that pass filters, or an SQL query."""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.trainer.cli.console import fail, say

if TYPE_CHECKING:
    import pyarrow as pa

    from treadle.tracing.trajectories import Filter, TrajectoryFiles

__all__ = ["main"]

_COLUMNS = (
    *("step", "phase", "task_id", "rollout_index", "reward", "stop", "num_turns", "tools"),
    "response",
)
_LIMIT = 20


class TrajectoriesError(RuntimeError):
    """There is nothing to show; the message names the cause, the value and the fix."""


def _parser() -> argparse.ArgumentParser:
    from treadle.tracing.trajectories import FILTER_COLUMNS, SCHEMA

    parser = argparse.ArgumentParser(
        prog="treadle trajectories",
        description="Shows the trajectories of a run or of an evaluation, also while it runs.\n\n"
        "A filter is conditions that must all hold, as\n"
        "  --filter 'reward<0.5 tool~python error= text~\"not found\"'\n"
        "with = != < <= > >= for numbers, = != ~ (contains) !~ for text; an empty value is a\n"
        f"missing one.\n\n{_wrapped('conditions know', FILTER_COLUMNS)}",
        epilog=_wrapped("columns", SCHEMA.names),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="its directory")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="FILTER",
        help="which trajectories; if given several times, all must hold",
    )
    parser.add_argument("--columns", metavar="A,B", help=f"default: {','.join(_COLUMNS)}")
    parser.add_argument(
        "--order-by",
        metavar="A,B",
        help="the first column counts first; --order-by=-A is for falling values",
    )
    parser.add_argument(
        "--sql", metavar="QUERY", help="a SELECT over the view `trajectories`, in DuckDB's SQL"
    )
    parser.add_argument(
        "--format",
        choices=("table", "json", "csv", "text", "sft"),
        default="table",
        help="json: an object per line; text: each trajectory as a conversation; sft: a row per "
        "line for treadle sft, of each that passes and can be imitated; default: table",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"maximum number of rows that are written; default: {_LIMIT}, and all of those of "
        "--sql and sft",
    )
    parser.add_argument(
        "--per-row",
        type=int,
        metavar="N",
        help="with --format sft: maximum number of different conversations of one row of the data",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    from treadle.tracing.trajectories import (
        DIRECTORY,
        FilterError,
        SqlError,
        TrajectoryFiles,
        UnknownColumnError,
    )
    from treadle.tracing.viewer.text import conversation
    from treadle.trainer.cli.rows import write_rows

    parser = _parser()
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit is {args.limit}: it must be at least 1")
    if args.sql is not None and (args.filter or args.columns or args.order_by):
        parser.error("--sql says itself which rows and columns it wants: leave out the others")
    if args.format in ("text", "sft") and (args.sql is not None or args.columns):
        parser.error(
            f"--format {args.format} shows whole trajectories: leave out --sql and --columns"
        )
    if args.per_row is not None and (args.format != "sft" or args.per_row < 1):
        parser.error(f"--per-row {args.per_row}: it must be at least 1, with --format sft")
    with TrajectoryFiles(args.run) as files:
        try:
            if not files.num_files and not files.damaged:
                raise TrajectoriesError(
                    f"{args.run / DIRECTORY} has no trajectories: name the directory of a run or "
                    "of an evaluation, after its first step"
                )
            if args.format == "sft":
                return _write_conversations(files, args)
            table, total = _answer(files, args)
            if args.format == "text":
                for row in table.to_pylist():
                    # None: its file was removed meanwhile.
                    if (found := files.one(**row)) is not None:
                        sys.stdout.write(f"{conversation(found)}\n\n")
        except (TrajectoriesError, FilterError, SqlError, UnknownColumnError) as error:
            return fail(error)
        damaged, left_out = files.damaged, files.left_out
    if args.format != "text":
        write_rows(table, args.format, sys.stdout)
    sys.stdout.flush()
    if table.num_rows < total:
        say(f"{table.num_rows:,} of {total:,}; --limit shows more", error=True)
    _say_missing(args.run, damaged, left_out)
    return 0


def _say_missing(run: Path, damaged: Mapping[str, str], left_out: int) -> None:
    from treadle.tracing.trajectories import DIRECTORY

    for name, damage in damaged.items():
        say(f"left out: {run / DIRECTORY / name}: {damage}", error=True)
    if left_out:
        say(
            f"{left_out:,} trajectories were not kept, because run.trajectories_max_bytes "
            "was reached",
            error=True,
        )


def _write_conversations(files: "TrajectoryFiles", args: argparse.Namespace) -> int:
    """Writes a row per conversation, and what was left out to standard error."""
    from treadle.trainer.preflight.table import INPUT_ERRORS
    from treadle.trainer.prepare.conversations import NEEDED, RunConversations

    found = files.query(_filter(args), columns=NEEDED, order_by=_names(args.order_by))
    unread = iter(found)
    try:
        conversations = RunConversations(args.run)
        rows = list(islice(conversations.of(unread, per_row=args.per_row), args.limit))
    except INPUT_ERRORS as error:
        return fail(error)
    sys.stdout.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    sys.stdout.flush()
    reasons = "".join(f"; left out {n:,}: {why}" for why, n in conversations.left_out.items())
    num_unread = sum(1 for _ in unread)
    more = f"; --limit left {num_unread:,} unread" if num_unread else ""
    say(
        f"{len(rows):,} conversations of {len(found) - num_unread:,} trajectories{reasons}{more}",
        error=True,
    )
    _say_missing(args.run, files.damaged, files.left_out)
    return 0 if rows else 1


def _filter(args: argparse.Namespace) -> "Filter":
    from treadle.tracing.trajectories import Filter

    where = Filter()
    for text in args.filter:
        where &= Filter.parse(text)
    return where


def _answer(files: "TrajectoryFiles", args: argparse.Namespace) -> "tuple[pa.Table, int]":
    """Returns the rows to show, and how many there are."""
    if args.sql is not None:
        table = files.sql(args.sql)
        return table.slice(0, args.limit), table.num_rows
    where = _filter(args)
    table = files.table(
        where,
        columns=_COLUMNS[:4] if args.format == "text" else _names(args.columns) or _COLUMNS,
        order_by=_names(args.order_by),
        limit=args.limit or _LIMIT,
    )
    return table, files.count(where)


def _wrapped(what: str, names: Iterable[str]) -> str:
    return textwrap.fill(f"{what}: {', '.join(names)}", 92, subsequent_indent="  ")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
