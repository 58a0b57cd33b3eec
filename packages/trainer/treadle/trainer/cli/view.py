"""`treadle view RUN_DIR...`: the runs in the browser, or with `--text` their curves as text."""

import argparse
import importlib.util
from collections.abc import Sequence

from treadle.trainer.cli.console import fail, say

__all__ = ["main"]

_LIBRARIES = ("duckdb", "pyarrow", "starlette", "uvicorn")
"""The libraries of treadle-tracing[viewer]."""


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
        help="print the curves as text, a line each, and the last alerts",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} is not installed: pip install 'treadle-tracing[viewer]'"
        return fail(ViewError(text))
    if args.text and (args.port is not None or args.no_browser or args.no_token):
        parser.error("--text serves no page: leave out --port, --no-browser and --no-token")
    from treadle.tracing.trajectories.run_directories import NotARunError
    from treadle.tracing.viewer.command import PortTakenError, serve
    from treadle.tracing.viewer.text import curves

    try:
        if args.text:
            say(curves(args.runs).removesuffix("\n"))
            return 0
        serve(args.runs, port=args.port, browser=not args.no_browser, token=not args.no_token)
    except (NotARunError, PortTakenError) as error:
        return fail(error)
    return 0
