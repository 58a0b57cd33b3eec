"""The command that starts a server in its engine's own environment.

Invariant: a test of a real engine speaks to a process; it never imports the engine. Where the
environment is not there, the test is skipped and says what would bring it.

Needs pytest, and is therefore imported by itself.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest

from treadle.rollout_server.testing.process import HERE

_IN_THIS_ENVIRONMENT = frozenset({"fake", "torch"})


def engine_command(engine: str) -> tuple[str, ...]:
    """Program and leading arguments of a server that can run `engine`.

    In this order: this interpreter for fake and torch; the pex ``packages.rollout_server/
    <engine>.pex`` below the current directory, where Pants puts what a test depends on; the
    words of the environment variable ``TREADLE_<ENGINE>_SERVER``.

    Args:
        engine: A name of the registry.

    Raises:
        pytest.skip.Exception: There is none.
    """
    if engine in _IN_THIS_ENVIRONMENT:
        return HERE
    pex = Path("packages.rollout_server") / f"{engine}.pex"
    if pex.exists():  # A directory, in the packed layout.
        return (sys.executable, str(pex.resolve()))
    variable = f"TREADLE_{engine.upper()}_SERVER"
    words = tuple(shlex.split(os.environ.get(variable, "")))
    if not words:
        pytest.skip(
            f"no environment for {engine}: set {variable} to the command that starts a server "
            f"there, as '/opt/{engine}/bin/python -m treadle.rollout_server'"
        )
    return words
