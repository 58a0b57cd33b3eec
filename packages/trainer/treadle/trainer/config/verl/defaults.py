"""verl's keys and their defaults, as `build-support/record_verl.py` recorded them.

Some defaults refer to another key, as `${oc.select:data.max_prompt_length,512}` does: the value of
that key, or 512 where nobody sets it. Such a key has its default where it agrees with the other.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from treadle.tools.interpolation import InterpolationError, resolve

__all__ = ["above", "has_default", "verl_defaults", "verl_keys"]

_RECORD = Path(__file__).parent / "defaults.json"


@cache
def verl_defaults() -> Mapping[str, Sequence[Any]]:
    """Returns the defaults of each key: one, or several where verl's training engines differ."""
    defaults: Mapping[str, Sequence[Any]] = json.loads(_RECORD.read_bytes())["defaults"]
    return defaults


def verl_keys() -> Sequence[str]:
    """Returns the settings; verl's notes on its own classes (`_target_`) are none."""
    return [key for key in verl_defaults() if not key.endswith("._target_")]


def above(key: str) -> str | None:
    """Returns the key itself, or the table of the user's own names that it is an entry of."""
    while key and key not in verl_defaults():
        key = key.rpartition(".")[0]
    return key or None


def has_default(key: str, value: Any, values: Mapping[str, Any]) -> bool:
    """Returns whether a value is one of the defaults of a recorded key.

    Args:
        values: All that the user gave, by key.
    """
    return any(
        _same(value, default) or _same(value, _resolved(key, default, values))
        for default in verl_defaults()[key]
    )


def _resolved(key: str, default: Any, values: Mapping[str, Any]) -> Any:
    """Returns the value that a default refers to, or the default itself."""
    try:
        return resolve(
            default,
            key,
            lambda other: values[other] if other in values else verl_defaults()[other][0],
        )
    except InterpolationError:
        return default


def _same(value: Any, default: Any) -> bool:
    """Returns whether two values are equal; true is not 1, and `{}` may be written as text."""
    if isinstance(value, bool) and isinstance(default, str):
        return str(value).lower() == default  # verl quotes it in its file
    if isinstance(value, bool) or isinstance(default, bool):
        return value is default
    if isinstance(value, list) and isinstance(default, list):
        return len(value) == len(default) and all(map(_same, value, default))
    return bool(value == default) or (default == {} and value == "{}")
