"""The resume check: which settings may change when a run is resumed, and which may not.

Data, starting weights, seed, group size and algorithm identify a run: if they changed, its curve
would continue as if nothing had happened. A path is compared by content, so the same files in
another place, as after a new installation, are no change.
"""

import filecmp
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.trainer.config.keys import flatten, leaf_of

__all__ = ["Changes", "compare"]

_IDENTITY = (
    "data.",
    "model.",
    "run.seed",
    "rollout.samples_per_prompt",
    "algorithm.advantage",
    "policy.lora.",
    "policy.freeze_vision_tower",
    "algorithm.reference_path",
)
_PATHS = (
    "data.train_files",
    "data.val_files",
    "model.path",
    "policy.lora.path",
    "algorithm.reference_path",
    "agent.tool_catalogue",
    "agent.interaction_catalogue",
)
_IRRELEVANT = ("run.dir", "run.resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The differences, one line per key.

    Attributes:
        breaking: Settings that would make it another run.
    """

    breaking: Sequence[str]
    allowed: Sequence[str]


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compares two dumped configurations: of the run as it began, and as it would resume.

    A setting that the release of then did not have counts as its default.
    """
    before, after = flatten(then), flatten(now)
    added = [key for key in after if key not in before]
    before |= {key: _default(key) for key in added}
    gone = [key for key in before if key not in after and leaf_of(key) is not None]
    changed = [
        key
        for key in (*after, *gone)
        if key not in _IRRELEVANT
        and before.get(key) != after.get(key)
        and not (key in _PATHS and _same_content(before.get(key), after.get(key)))
    ]
    lines = {key: f"{key} was {before.get(key)!r} and is {after.get(key)!r}" for key in changed}
    return Changes(
        breaking=[line for key, line in lines.items() if key.startswith(_IDENTITY)],
        allowed=[line for key, line in lines.items() if not key.startswith(_IDENTITY)],
    )


def _default(key: str) -> object:
    """Returns the default of a setting as JSON has it."""
    leaf = leaf_of(key)
    default = None if leaf is None or leaf.key != key else leaf.default
    return list(default) if isinstance(default, tuple) else default


def _same_content(then: object, now: object) -> bool:
    """Returns whether two paths, or two lists of paths, lead to the same bytes."""
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(_same_content, then, now))
    if not (isinstance(then, str) and isinstance(now, str)):
        return False
    old, new = Path(then), Path(now)
    if old.is_file() and new.is_file():
        return filecmp.cmp(old, new, shallow=False)
    if not (old.is_dir() and new.is_dir()):
        return False
    names = sorted(path.name for path in old.iterdir() if path.is_file())
    if names != sorted(path.name for path in new.iterdir() if path.is_file()):
        return False
    _, different, unreadable = filecmp.cmpfiles(old, new, names, shallow=False)
    return not different and not unreadable
