"""The arguments of the page, for both commands that serve it. Standard library only."""

import argparse
from pathlib import Path
from typing import Final

__all__ = ["HOST", "PORT", "TOKEN_VARIABLE", "add_arguments"]

HOST: Final = "127.0.0.1"
PORT: Final = 6417
"""Where the page is, unless the port is taken."""
TOKEN_VARIABLE: Final = "TREADLE_VIEW_TOKEN"
"""Holds the page's token, where it is not to be a new one each time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run directories, `--port`, `--no-browser` and `--no-token`."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN_DIR", help="a run directory; several compare"
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help=f"listen on this port of {HOST}; 0 picks a free one. Without it: {PORT}, or a free "
        "one where that is taken",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="print the address and open no browser"
    )
    parser.add_argument(
        "--no-token",
        action="store_true",
        help="let every user of this machine read the runs; without it, the page is for those who "
        f"have the address that is printed, or the token in {TOKEN_VARIABLE}",
    )
