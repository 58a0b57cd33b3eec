"""`calc_gsm8k_reward(answer)`: lets the model check its answer before it gives it.

Invariant: the state of a session is the reward of the previous call, at first 0.0, and lasts for
the whole trajectory (in verl it is lost after every call). A call that does not improve on it
costs 0.05: so does a wrong first answer, and repeating a right one. Pure; nobody waits.

The wording, the reading of the answer (`flexible`) and the costs are verl's `Gsm8kTool`.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.agent_loop import AgentTask, SetupError, ToolResult, ToolSpec
from treadle.tools.arguments import no_settings
from treadle.tools.rewards import gsm8k

SPEC = ToolSpec(
    name="calc_gsm8k_reward",
    description="A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, "
    "0.0 if parsed answer is incorrect or not correctly parsed)",
    parameters={
        "type": "object",
        "properties": {
            "answer": {
                "type": "string",
                "description": "The model's answer to the GSM8K math problem, must be a digits",
            }
        },
        "required": ["answer"],
    },
)

_MARK = "#### "
_NO_IMPROVEMENT = -0.05


class Gsm8kTool:
    """Opens a session per trajectory with the ground truth of its row.

    Args:
        config: No settings are known; any key is an error.
        spec: What the model is told, if not `SPEC`.
    """

    def __init__(
        self, *, config: Mapping[str, object] | None = None, spec: ToolSpec = SPEC
    ) -> None:
        no_settings(type(self).__name__, config)
        self.spec = spec

    async def open(self, task: AgentTask) -> Gsm8kSession:
        """Begin with the ground truth in the row's `extra_info.tools_kwargs`.

        Raises:
            SetupError: `extra_info.tools_kwargs.<tool>.create_kwargs.ground_truth` is missing.
        """
        value: object = task.fields
        path = ("extra_info", "tools_kwargs", self.spec.name, "create_kwargs", "ground_truth")
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if not isinstance(value, str):
            raise SetupError(
                f"task {task.task_id!r}: the tool {self.spec.name} needs a string in "
                f"{'.'.join(path)} of its row, found {value!r}"
            )
        return Gsm8kSession(ground_truth=value)


class Gsm8kSession:
    """What one trajectory has asked so far: the reward of its previous call."""

    def __init__(self, *, ground_truth: str) -> None:
        self._ground_truth = ground_truth
        self._previous = 0.0

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Score `arguments["answer"]`; a missing answer counts as an empty one, as in verl."""
        answer = arguments.get("answer", "")
        if not isinstance(answer, str):
            answer = str(answer)
        response = answer if answer.startswith(_MARK) else _MARK + answer
        reward = gsm8k.score(response, self._ground_truth, mode="flexible")
        improved = reward > self._previous
        self._previous = reward
        # verl gives the integer 0 for an answer without a number, and the model sees it so.
        shown = reward if gsm8k.extract(response, mode="flexible") is not None else 0
        return ToolResult(
            content=f"Current parsed {answer=} reward={shown}",
            reward=0.0 if improved else _NO_IMPROVEMENT,
        )

    async def aclose(self) -> None:
        """Nothing to free."""
