"""A row of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row. `place` names its file and line for messages, such as "train.jsonl, line 12".

    Attributes:
        exact: Whether a null is a value of its own, as in JSONL; in Parquet it also stands for a
            key that only other rows have.
    """

    index: int
    place: str
    columns: Mapping[str, object]
    exact: bool = False
