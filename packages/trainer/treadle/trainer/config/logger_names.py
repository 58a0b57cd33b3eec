"""The loggers that `run.loggers` takes by name. Loads none of their libraries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["ALWAYS", "NAMED", "same_short_name", "short_name", "unknown_logger"]

ALWAYS: Final = ("console", "jsonl")
"""Names that stand for what every run has anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLogger:
    """A logger of this package.

    Attributes:
        module: Module of this package; its class is `Logger`.
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
