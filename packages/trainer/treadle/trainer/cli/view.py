"""`treadle view RUN_DIR...`: the runs in the browser, while they train and afterwards."""

import argparse
import importlib.util
from collections.abc import Sequence

from treadle.trainer.cli.console import fail

__all__ = ["main"]

_LIBRARIES = ("duckdb", "plotly", "pyarrow", "starlette", "uvicorn")


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
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted; returns the exit status."""
    args = _parser().parse_args(argv)
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        text = f"{', '.join(missing)} is not installed: pip install 'treadle-tracing[viewer]'"
        return fail(ViewError(text))
    from treadle.tracing.viewer.command import PortTakenError, serve
    from treadle.tracing.viewer.runs import NotARunError

    try:
        serve(args.runs, port=args.port, browser=not args.no_browser)
    except (NotARunError, PortTakenError) as error:
        return fail(error)
    return 0
