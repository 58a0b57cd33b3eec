"""The GSM8K reward: 1.0 if the answer read off the text equals the ground truth, else 0.0.

Invariant: `strict` and `flexible` give exactly what verl's `reward_score/gsm8k.py` gives, with its
quirks, so that curves can be compared; `fixed` is what they were meant to be. Pure functions of
two strings.

| | strict | flexible | fixed |
|---|---|---|---|
| looks at | the last 300 characters | the last 300 characters | the whole text |
| answer | number after the last `#### ` | the last number | number after the last `####` |
| space after `####` | exactly one | - | any, also none |
| sentence stop (`42.`) | sticks to it: wrong | sticks to it: wrong | not part of it |
| thousands (`1,234`) | commas removed | commas kept: wrong | commas removed |
| currency (`$42`) | no answer | ignored | ignored |
| `42.0` for `42` | wrong: compared as text | wrong: compared as text | right: compared as numbers |
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final, Literal, get_args

Mode = Literal["strict", "flexible", "fixed"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

_TAIL = 300
_STRICT: Final = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER: Final = re.compile(r"-?[0-9.,]+")
_FIXED: Final = re.compile(
    r"####[\s*$]*(?P<number>(?:-\s*\$?)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+))"
)
_DECORATION: Final = re.compile(r"[\s,$]")


def extract(text: str, *, mode: Mode) -> str | None:
    """Returns the answer that `text` gives, as text, or None if it gives none."""
    match mode:
        case "strict":
            answers: list[str] = _STRICT.findall(text[-_TAIL:])
            return answers[-1].replace(",", "") if answers else None
        case "flexible":
            numbers: list[str] = _NUMBER.findall(text[-_TAIL:])
            if not numbers:
                return None
            # A lone "." is no number, unless there is nothing else: then verl returns the first.
            return next((number for number in reversed(numbers) if number != "."), numbers[0])
        case "fixed":
            matches = list(_FIXED.finditer(text))
            return _DECORATION.sub("", matches[-1]["number"]) if matches else None


def score(text: str, ground_truth: str, *, mode: Mode = "strict") -> float:
    """1.0 if `text` answers `ground_truth`, else 0.0.

    Raises:
        ValueError: With `mode="fixed"`, if `ground_truth` is not a number.
    """
    answer = extract(text, mode=mode)
    if answer is None:
        return 0.0
    if mode != "fixed":
        return float(answer == ground_truth)
    return float(Decimal(answer) == _as_number(ground_truth))


def _as_number(ground_truth: str) -> Decimal:
    plain = _DECORATION.sub("", ground_truth)
    if re.fullmatch(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)", plain) is None:
        raise ValueError(f"the ground truth {ground_truth!r} is not a number")
    return Decimal(plain)
