"""Loads a logger by its name, or your own by its import path.

Invariant: importing this module loads none of the libraries.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import cast

from treadle.agent_loop import SetupError, load_import_path
from treadle.trainer.config.logger_names import NAMED
from treadle.trainer.loggers.run_logger import LoggedRun, RunLogger

__all__ = ["check_logger", "load_logger"]

_METHODS = ("metrics", "table", "finish")


def check_logger(name: str) -> None:
    """Rejects a logger that could not be started; does not import a library of the table.

    Raises:
        SetupError: Its library is not installed, or the user's class cannot be loaded.
    """
    named = NAMED.get(name)
    if named is None:
        load_logger(name)
    elif importlib.util.find_spec(named.library) is None:
        raise SetupError(
            f"run.loggers names {name}, and the library {named.library} is not installed: "
            f'pip install "treadle-trainer[{name}]"'
        )


def load_logger(name: str) -> Callable[[LoggedRun], RunLogger]:
    """Returns what makes the logger.

    Args:
        name: From the table, or path.py:Class or package.module:Class.

    Raises:
        SetupError: The user's class cannot be loaded, or lacks a method.
        ImportError: The library is not installed.
    """
    named = NAMED.get(name)
    if named is not None:
        module = importlib.import_module(f"treadle.trainer.loggers.{named.module}")
        return cast(Callable[[LoggedRun], RunLogger], module.Logger)
    made_by = load_import_path(name, "logger")
    if not callable(made_by):
        raise SetupError(f"the logger {name!r} is {made_by!r}; it must be a class")
    if isinstance(made_by, type):
        missing = [each for each in _METHODS if not callable(getattr(made_by, each, None))]
        if missing:
            raise SetupError(
                f"the logger {name!r} lacks {', '.join(missing)}; it needs the methods "
                "metrics(step, values), table(step, table) and finish(end, summary)"
            )
    return cast(Callable[[LoggedRun], RunLogger], made_by)
