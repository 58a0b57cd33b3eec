"""`calc_geo3k_reward(answer)`: lets the model check its answer to a geometry problem.

The wording and the costs are verl's `Geo3kTool`; what its session remembers is in `answer_check`.
A separate process with a time limit decides whether two answers are mathematically equal: a model
can write what never ends to simplify, and is then told so. Needs the extra `math`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from treadle.agent_loop import ToolFailure, ToolSpec
from treadle.agent_loop.time_limited import TimeLimited
from treadle.tools.answer_check import AnswerCheck, answer_spec
from treadle.tools.arguments import no_settings, require_extra

SPEC = answer_spec(
    "calc_geo3k_reward",
    "A tool for calculating the reward of geo3k. (1.0 if parsed answer is correct, 0.0 if parsed "
    "answer is incorrect or not correctly parsed)",
    "The model's answer to the geo3k problem, must be a digits",
)

_TIMEOUT_S = 5.0


class Geometry3kTool(AnswerCheck):
    """Opens a session per trajectory with the ground truth of its row.

    Args:
        config: No settings are known; any key is an error.
        spec: Description for the model; None: `SPEC`.

    Raises:
        SetupError: There is a setting, or math-verify is not installed.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        no_settings(type(self).__name__, config)
        require_extra(type(self).__name__, "math_verify", "math")
        super().__init__(spec=spec, check=self._compare)
        self._same: TimeLimited[tuple[str, str], bool] = TimeLimited(
            _comparison, name=spec.name, timeout_s=_TIMEOUT_S, processes=1
        )

    async def _compare(self, answer: str, ground_truth: str) -> float:
        try:
            return float(await self._same((answer, ground_truth)))
        except TimeoutError as error:
            raise ToolFailure("the answer is too complicated to be compared") from error


def _comparison() -> Callable[[tuple[str, str]], bool]:
    """Returns the function of the process, which imports what it needs there."""
    from treadle.tools.rewards.geometry3k import prepare, same

    prepare()
    return lambda pair: same(*pair)
