"""The command that starts a server in the environment of its engine.

Invariant: a test of a real engine talks to a process and never imports the engine. Without the
environment the test is skipped, and the message explains how to provide it.

This module needs pytest, so `testing` does not import it.
"""

import os
import shlex
import sys
from pathlib import Path

import pytest

from treadle.rollout_server.testing.process import HERE

_IN_THIS_ENVIRONMENT = frozenset({"fake", "torch"})
_ENVIRONMENTS = {"vllm_stock": "vllm"}
"""Engine -> the engine in whose environment it runs, where that is another one."""


def engine_command(engine: str) -> tuple[str, ...]:
    """Returns the program and leading arguments of a server that can run `engine`.

    Tried in this order: this interpreter for fake and torch; the pex ``packages.rollout_server/
    <engine>.pex`` below the current directory, where Pants puts the dependencies of a test; the
    environment variable ``TREADLE_<ENGINE>_SERVER``.

    Args:
        engine: Name of the engine in the registry.

    Raises:
        pytest.skip.Exception: No environment has the engine.
    """
    if engine in _IN_THIS_ENVIRONMENT:
        return HERE
    engine = _ENVIRONMENTS.get(engine, engine)
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
