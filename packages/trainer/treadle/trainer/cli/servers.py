"""`treadle servers`: the rollout servers of a run that runs now; adds and drains them."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.cli.console import fail, say

__all__ = ["main"]

_STALE_S = 15.0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle servers",
        description="Shows the rollout servers of a run, and changes them while it runs.",
        epilog="Each command needs --run-dir RUN, the run's directory.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "add",
        description="Lets in a server that runs already, with the run's model and token. It gets "
        "the present weights as soon as the policy holds them, and serves from then on.",
    )
    add.add_argument("which", metavar="HOST:PORT", help="its address")
    add.add_argument(
        "--no-wait",
        dest="wait",
        action="store_false",
        help="return once it fits, and not only when it serves",
    )
    drain = commands.add_parser(
        "drain",
        description="Gives a server no new session; it leaves the run between two steps, once its "
        "sessions have ended. Its process ends if the run started it.",
    )
    drain.add_argument("which", metavar="SERVER", help="its address, or its name in the list")
    drain.add_argument(
        "--now", action="store_true", help="its sessions move with their next request"
    )
    listed = commands.add_parser("list", description="Shows the servers.")
    for command in (add, drain, listed):
        command.add_argument("--run-dir", type=Path, required=True, metavar="RUN")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 2 if it was refused."""
    from treadle.trainer.rollout.control.control_files import ControlError, Request, ask, read_list

    args = _parser().parse_args(argv)
    try:
        if args.command == "list":
            _show(*read_list(args.run_dir))
        else:
            now, wait = getattr(args, "now", False), getattr(args, "wait", True)
            request = Request(action=args.command, which=args.which, now=now)
            say(ask(args.run_dir, request, say=say, wait=wait))
    except ControlError as error:
        return fail(error)
    except OSError as error:
        where = error.filename or args.run_dir
        return fail(ControlError(f"{where}: {error.strerror or error}"), status=1)
    return 0


def _show(age_s: float, servers: Sequence[object]) -> None:
    import sys

    import pyarrow as pa

    from treadle.trainer.cli.rows import write_rows

    if age_s > _STALE_S:
        say(f"the trainer wrote this {age_s:.0f} s ago and may have been killed", error=True)
    write_rows(pa.Table.from_pylist(list(servers)), "table", sys.stdout)
