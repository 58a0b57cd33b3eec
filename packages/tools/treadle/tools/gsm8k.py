"""`calc_gsm8k_reward(answer)`: lets the model check its answer before it gives it.

The reading of the answer (`flexible`), the wording and the costs are verl's `Gsm8kTool`; what its
session remembers is in `answer_check`.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.agent_loop import ToolSpec
from treadle.tools.answer_check import AnswerCheck, answer_spec
from treadle.tools.arguments import no_settings
from treadle.tools.rewards import gsm8k

SPEC = answer_spec(
    "calc_gsm8k_reward",
    "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, "
    "0.0 if parsed answer is incorrect or not correctly parsed)",
    "The model's answer to the GSM8K math problem, must be a digits",
)

_MARK = "#### "


class Gsm8kTool(AnswerCheck):
    """Opens a session per trajectory with the ground truth of its row.

    Args:
        config: No settings are known; any key is an error.
        spec: Description for the model; None: `SPEC`.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        no_settings(type(self).__name__, config)
        super().__init__(spec=spec, check=_check)


def _check(answer: str, ground_truth: str) -> float:
    response = answer if answer.startswith(_MARK) else _MARK + answer
    # verl gives the integer 0 for an answer without a number, and the model sees it so.
    if gsm8k.extract(response, mode="flexible") is None:
        return 0
    return gsm8k.score(response, ground_truth, mode="flexible")
