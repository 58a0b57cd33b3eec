"""`treadle serve MODEL`: the service, which is a package of its own above this one."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence

from treadle.agent_loop import SetupError
from treadle.trainer.cli.console import fail

__all__ = ["main"]

_MODULE = "treadle.serve.main"


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted; returns the exit status."""
    if importlib.util.find_spec(_MODULE.rpartition(".")[0]) is None:
        return fail(SetupError("treadle serve is not installed: pip install treadle-serve"))
    command: Callable[[Sequence[str]], int] = importlib.import_module(_MODULE).main
    return command(argv)
