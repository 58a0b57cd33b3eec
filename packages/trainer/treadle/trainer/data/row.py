"""A row of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle.trainer.data.errors import nearest

__all__ = ["Row", "completed"]


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


def completed(columns: Mapping[str, object], file: Path) -> Mapping[str, object]:
    """Returns a row with what it may leave out: `data_source`, the file's name; `reward_model`, {}.

    A `prompt` that is a text becomes one message of the user. A column whose name is nearly that of
    a missing one is a mistake, so nothing stands in for it.
    """
    prompt = columns.get("prompt")
    if prompt is None:
        return columns
    given: dict[str, object] = {"data_source": file.stem, "reward_model": {}}
    row = {n: v for n, v in given.items() if n not in columns and not nearest(n, columns)}
    if isinstance(prompt, str) and prompt.strip():
        row["prompt"] = [{"role": "user", "content": prompt}]
    return {**columns, **row} if row else columns
