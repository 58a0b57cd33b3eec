"""The command line of the page: reads the arguments, listens on loopback, opens the browser.

Invariant: the socket is bound before its address is printed, so that the address always works. The
server runs until it is interrupted.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import uvicorn

from treadle.tracing.inert import inert
from treadle.tracing.trajectories.run_directories import NotARunError
from treadle.tracing.viewer.app import make_app
from treadle.tracing.viewer.arguments import HOST, PORT, TOKEN_VARIABLE, add_arguments
from treadle.tracing.viewer.runs import open_runs

__all__ = ["PortTakenError", "main", "serve"]

_GRACE_S: Final = 1
_SHORTEST_TOKEN: Final = 16


class PortTakenError(ValueError):
    """The page cannot listen, or has no usable token; the message names the cause and the fix."""


def main(argv: Sequence[str]) -> int:
    """Serves the page until it is interrupted; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="viewer",
        description="Shows runs in the browser, while they train and afterwards: curves, "
        "trajectories, the time of a step. Reads the run directories and writes nothing.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        serve(args.runs, port=args.port, browser=not args.no_browser, token=not args.no_token)
    except (NotARunError, PortTakenError) as error:
        sys.stderr.write(inert(f"error: {error}\n"))
        return 2
    return 0


def serve(directories: list[Path], *, port: int | None, browser: bool, token: bool = True) -> None:
    """Serves the page of some run directories until SIGINT or SIGTERM.

    Args:
        directories: There is at least one, never none.
        port: 0 for a free one; None for the usual one, or a free one.
        browser: Whether to open the page.
        token: Whether a reader needs the token, which the printed address holds.

    Raises:
        NotARunError: A directory is none of a run.
        PortTakenError: The port cannot be used, or the token of the environment is too short.
    """
    key = _token() if token else None
    app = make_app(open_runs(directories), token=key)
    with _listen(port) as listening, tempfile.TemporaryDirectory() as folder:
        address = f"http://{HOST}:{listening.getsockname()[1]}/"
        address += "" if key is None else f"?token={quote(key)}"
        sys.stdout.write(f"{address}  (Ctrl-C ends it)\n")
        sys.stdout.flush()
        if browser:
            # Only its owner reads the folder; every user sees the arguments of a browser.
            leads = Path(folder, "treadle-view.html")
            leads.write_text(f'<meta http-equiv="refresh" content="0;url={address}">')
            # Finding a browser takes a second or two; the first request waits in the socket.
            opening = (leads.as_uri() if key is not None else address,)
            threading.Thread(target=webbrowser.open, args=opening, daemon=True).start()
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        uvicorn.Server(config).run(sockets=[listening])


def _token() -> str:
    given = os.environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(24)
    if len(given) < _SHORTEST_TOKEN or not (given.isascii() and given.isprintable()):
        raise PortTakenError(
            f"{TOKEN_VARIABLE} must have at least {_SHORTEST_TOKEN} ASCII characters; "
            "unset it for a new token each time, or pass --no-token for none"
        )
    return given


def _listen(port: int | None) -> socket.socket:
    for wanted in (PORT, 0) if port is None else (port,):
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, wanted))
            listening.listen()
        except (OSError, OverflowError) as error:
            listening.close()
            if wanted == port:
                reason = getattr(error, "strerror", None) or error
                raise PortTakenError(
                    f"--port {port} of {HOST}: {reason}; name another, or 0 for a free one"
                ) from error
        else:
            return listening
    raise PortTakenError(f"no port of {HOST} is free: end a program that listens")
