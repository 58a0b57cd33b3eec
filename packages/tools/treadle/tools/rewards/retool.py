r"""The reward of ReTool: DAPO's, boxed, with credit for tool turns where the answer is wrong.

Invariant: `shaped` gives exactly what verl's `recipe/retool` gives, but for integers with leading
zeros (`math_dapo`). A right answer is 1 in every
mode; what a wrong one of n turns gives (n as verl counts them: 2 without a tool call) is

| mode | a wrong answer | n = 2 | n = 4 | n = 12 | n >= 22 |
|---|---|---|---|---|---|
| shaped | min(0, -1 + 0.1 (n - 2) / 2) | -1.0 | -0.9 | -0.5 | 0.0 |
| flat | -1 | -1.0 | -1.0 | -1.0 | -1.0 |
| capped | min(-0.5, shaped) | -1.0 | -0.9 | -0.5 | -0.5 |

`shaped` can be gamed: a model that calls tools to no end is paid for it. `flat` and `capped` are
the two remedies that its users found; `reward/wrong_with_many_turns` shows whether one is needed.
All functions are pure.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from treadle.tools.rewards import math_dapo

Mode = Literal["shaped", "flat", "capped"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

MANY_TURNS: Final = 12
"""From here on `shaped` takes back half of the penalty or more."""


def score(text: str, ground_truth: str, *, num_turns: int, mode: Mode = "shaped") -> float:
    """Returns the reward of a final `text` after `num_turns` turns; above 0 if it is right."""
    if math_dapo.is_right(text, ground_truth, mode="boxed"):
        return 1.0
    shaped = min(0.0, -1.0 + 0.1 * (num_turns - 2) / 2)
    match mode:
        case "shaped":
            return shaped
        case "flat":
            return -1.0
        case "capped":
            return min(-0.5, shaped)
