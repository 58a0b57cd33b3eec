"""The arguments of the page, for both commands that serve it. Standard library only."""

import argparse
from pathlib import Path
from typing import Final

__all__ = ["HOST", "PORT", "add_arguments"]

HOST: Final = "127.0.0.1"
PORT: Final = 6417
"""Where the page is, unless the port is taken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the run directories, `--port` and `--no-browser`."""
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
