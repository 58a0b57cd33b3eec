r"""The reward of Geometry3K: 0.9 for the right answer and 0.1 for the required form.

Invariant: the weights and the form are those of verl's `reward_score/geo3k.py`: reasoning in
<think> tags, then an answer in `\boxed{}`. math-verify,
which reads LaTeX by a grammar, decides whether two answers are mathematically equal; verl uses
mathruler, which evaluates the model's text.

Simplifying what a model wrote can take arbitrarily long: `lookup` calls this in a worker process
with a time limit. Needs the extra `math`.
"""

from __future__ import annotations

from typing import Final

import math_verify

from treadle.tools.rewards.boxed import last_boxed

_FORM: Final = ("<think>", "</think>", r"\boxed{", "}")
_ACCURACY_WEIGHT = 0.9


def prepare() -> None:
    """Loads the grammar, so that it does not count as the time of the first answer."""
    same("1", r"\sqrt{2}")


def same(answer: str, ground_truth: str) -> bool:
    """Returns whether two answers are the same mathematics."""
    if answer.strip() == ground_truth.strip():
        return True
    return bool(math_verify.verify(_read(ground_truth), _read(answer), timeout_seconds=None))


def is_right(text: str, ground_truth: str) -> bool:
    r"""Returns whether the last `\boxed{}` of `text` is the ground truth."""
    answer = last_boxed(text)
    return answer is not None and same(answer, ground_truth)


def has_form(text: str) -> bool:
    """Returns whether reasoning and answer are in the required order and form."""
    place = 0
    for mark in _FORM:
        found = text.find(mark, place)
        if found < 0:
            return False
        place = found + len(mark)
    return text.startswith(_FORM[0])


def weigh(*, right: bool, formed: bool) -> float:
    """Returns the reward, in [0, 1]."""
    return _ACCURACY_WEIGHT * right + (1 - _ACCURACY_WEIGHT) * formed


def _read(answer: str) -> list[object]:
    # In dollars, so that a bare number and an expression are read by the same grammar. The limit
    # is the worker's: math-verify's own needs the main thread's alarm signal.
    return list(math_verify.parse(f"${answer}$", parsing_timeout=None))
