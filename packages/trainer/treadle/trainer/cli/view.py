"""`treadle view RUN_DIR...`: the runs in the browser, or with `--text` in the terminal."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.cli.console import fail

__all__ = ["main"]

_LIBRARIES = {
    "viewer": ("duckdb", "plotly", "pyarrow", "starlette", "uvicorn"),
    "terminal": ("duckdb", "pyarrow", "textual", "textual_plotext"),
}
"""The libraries of each extra of treadle-tracing."""


class ViewError(RuntimeError):
    """The runs cannot be shown; the message names the cause, the value and the fix."""


def _parser() -> argparse.ArgumentParser:
    from treadle.tracing.viewer.arguments import add_arguments

    parser = argparse.ArgumentParser(
        prog="treadle view",
        description="Shows runs in the browser, while they train and afterwards: curves, "
        "trajectories with their tokens, and where the time of a step went. The page is for this "
        "machine only; the run directories are read and never written.",
    )
    add_arguments(parser)
    parser.add_argument(
        "--text",
        action="store_true",
        help="show curves and trajectories in this terminal, without a browser",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    extra = "terminal" if args.text else "viewer"
    missing = [name for name in _LIBRARIES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} is not installed: pip install 'treadle-tracing[{extra}]'"
        return fail(ViewError(text))
    if args.text:
        if args.port is not None or args.no_browser or args.no_token:
            parser.error("--text serves no page: leave out --port, --no-browser and --no-token")
        return _show_in_terminal(args.runs)
    from treadle.tracing.trajectories.run_directories import NotARunError
    from treadle.tracing.viewer.command import PortTakenError, serve

    try:
        serve(args.runs, port=args.port, browser=not args.no_browser, token=not args.no_token)
    except (NotARunError, PortTakenError) as error:
        return fail(error)
    return 0


def _show_in_terminal(runs: Sequence[Path]) -> int:
    from treadle.tracing.terminal import run
    from treadle.tracing.trajectories.run_directories import NotARunError

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return fail(ViewError("--text needs a terminal for its input and its output"))
    try:
        run(runs)
    except NotARunError as error:
        return fail(error)
    return 0
