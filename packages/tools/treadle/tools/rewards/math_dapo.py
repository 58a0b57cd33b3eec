r"""The reward of DAPO's mathematics questions: right is 1, wrong is -1.

Invariant: both modes give exactly what verl's `reward_score/math_dapo.py` gives, quirks included,
but for integers, which are compared as integers: AIME writes 25 as `025`, and verl calls that wrong
where the row has 25. Pure functions of two strings.

| | minerva (verl's default) | boxed (`strict_box_verify`) |
|---|---|---|
| looks at | the last 300 characters | the last 100 characters |
| answer | the line after the last `Answer:` | what the last `\boxed{}` holds |
| compared | as text, after normalisation of both | as text, as they are |
| integers | without leading zeros | without leading zeros |

The normalisation is that of Minerva (Lewkowycz et al., "Solving Quantitative Reasoning Problems
with Language Models", 2022, appendix D.1). It removes units and words anywhere in the answer, also
where they are part of another word (`a ` in `gamma `): that is a quirk, and kept.
"""

from __future__ import annotations

import re
from typing import Final, Literal, get_args

from treadle.tools.rewards.boxed import last_boxed

Mode = Literal["minerva", "boxed"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

_TAIL, _BOXED_TAIL = 300, 100
_LEADING_ZEROS: Final = re.compile(r"(-?)0+(\d+)")
_ANSWER: Final = re.compile(r"(?i)answer\s*:\s*([^\n]+)")

# Minerva's tables, in its order, which matters: spaces go before the words that hold none.
_SUBSTITUTED: Final = (
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), ("\\ ", ""), (" ", "")),
    *(("mbox", "text"), (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
)
_REMOVED: Final = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *(r"\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_UNWRAPPED: Final = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def normalise(answer: str) -> str:
    """Returns an answer without units, words, spaces and TeX's shorthands."""
    answer = answer.split("=")[-1]
    for before, after in _SUBSTITUTED:
        answer = answer.replace(before, after)
    for expression in _REMOVED:
        answer = answer.replace(expression, "")
    for pattern, inner in _UNWRAPPED:
        answer = pattern.sub(inner, answer)
    answer = answer.replace("$", "")
    if (digits := answer.replace(",", "")).isdigit():
        answer = digits
    return answer.strip()


def extract(text: str, *, mode: Mode = "minerva") -> str | None:
    """Returns the answer that `text` gives, as it is compared; None if it gives none."""
    tail = text[-_TAIL:]
    if mode == "boxed":
        boxed = last_boxed(tail[-_BOXED_TAIL:])
        return None if boxed is None else _without_leading_zeros(boxed)
    answers: list[str] = _ANSWER.findall(tail)
    return _without_leading_zeros(normalise(answers[-1])) if answers else None


def is_right(text: str, ground_truth: str, *, mode: Mode = "minerva") -> bool:
    """Returns whether `text` answers `ground_truth`."""
    answer = extract(text, mode=mode)
    if mode == "boxed":
        return answer == _without_leading_zeros(ground_truth)
    truth = _without_leading_zeros(normalise(ground_truth))
    return (normalise("[INVALID]") if answer is None else answer) == truth


def _without_leading_zeros(answer: str) -> str:
    """Returns an integer as it is usually written, and any other answer as it is."""
    integer = _LEADING_ZEROS.fullmatch(answer)
    return f"{integer[1]}{integer[2]}" if integer else answer


def score(text: str, ground_truth: str, *, mode: Mode = "minerva") -> float:
    """1.0 if `text` answers `ground_truth`, else -1.0."""
    return 1.0 if is_right(text, ground_truth, mode=mode) else -1.0
