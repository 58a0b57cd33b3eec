"""The loggers by name: which module has each, which library it needs, and how your own is loaded.

Invariant: importing this module loads none of the libraries.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, cast

from treadle.agent_loop import SetupError, load_import_path
from treadle.trainer.loggers.run_logger import LoggedRun, RunLogger

__all__ = [
    "ALWAYS",
    "NAMED",
    "check_logger",
    "load_logger",
    "same_short_name",
    "short_name",
    "unknown_logger",
]

ALWAYS: Final = ("console", "jsonl")
"""Names that stand for what every run has anyway."""

_METHODS = ("metrics", "table", "finish")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLogger:
    """A logger of this package.

    Attributes:
        module: Of this package; its class is `Logger`.
        library: What it imports.
    """

    module: str
    library: str


NAMED: Final[Mapping[str, NamedLogger]] = MappingProxyType(
    {
        "mlflow": NamedLogger(module="to_mlflow", library="mlflow"),
        "tensorboard": NamedLogger(module="to_tensorboard", library="tensorboardX"),
        "trackio": NamedLogger(module="to_trackio", library="trackio"),
        "wandb": NamedLogger(module="to_wandb", library="wandb"),
    }
)
"""The loggers by the names that `run.loggers` takes; each name is an extra of treadle-trainer."""


def unknown_logger(name: str) -> bool:
    """Returns whether the name is neither in the table nor that of a class of the user's."""
    return name not in ALWAYS and name not in NAMED and ":" not in name


def short_name(name: str) -> str:
    """Returns a logger's name for messages and files: of path.py:Class, the class."""
    return name.rpartition(":")[2]


def same_short_name(names: Sequence[str]) -> tuple[str, str] | None:
    """Returns two loggers that would share their files in the run directory; None if none do."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(short_name(name), name)
        if other != name:
            return other, name
    return None


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
