"""Tools by which a model checks its answer before it gives it, as verl's for GSM8K and Geometry3K.

Invariant: the state of a session is the reward of the previous call, at first 0.0, and lasts for
the whole trajectory (in verl it is lost after every call). A call that does not improve on it
costs 0.05: so does a wrong first answer, and repeating a right one. The wording and the costs are
verl's. Concurrent calls of one turn are scored one after the other, in order.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping

from treadle.agent_loop import AgentTask, ToolResult, ToolSpec
from treadle.tools.arguments import truth_of

_NO_IMPROVEMENT = -0.05

Check = Callable[[str, str], float | Awaitable[float]]
"""(answer, ground truth) to the reward that the model is shown."""


def answer_spec(name: str, description: str, answer: str) -> ToolSpec:
    """Returns the schema of a tool that takes the text `answer`, described as given."""
    return ToolSpec(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {"answer": {"type": "string", "description": answer}},
            "required": ["answer"],
        },
    )


class AnswerCheck:
    """Opens a session per trajectory with the ground truth of its row."""

    def __init__(self, *, spec: ToolSpec, check: Check) -> None:
        self.spec = spec
        self._check = check

    async def open(self, task: AgentTask) -> AnswerCheckSession:
        """Begins with the ground truth in the row's `extra_info.tools_kwargs`.

        Raises:
            SetupError: `extra_info.tools_kwargs.<tool>.create_kwargs.ground_truth` is missing.
        """
        return AnswerCheckSession(check=self._check, ground_truth=self._ground_truth(task))

    def check_task(self, task: AgentTask) -> None:
        """See `treadle.agent_loop.ChecksTask`."""
        self._ground_truth(task)

    def _ground_truth(self, task: AgentTask) -> str:
        path = ("extra_info", "tools_kwargs", self.spec.name, "create_kwargs", "ground_truth")
        return truth_of(task, *path, needed_by=f"the tool {self.spec.name}")


class AnswerCheckSession:
    """The checks of one trajectory so far: the reward of its previous call."""

    def __init__(self, *, check: Check, ground_truth: str) -> None:
        self._check = check
        self._ground_truth = ground_truth
        self._previous = 0.0
        self._turn = asyncio.Lock()

    async def call(self, arguments: Mapping[str, object]) -> ToolResult:
        """Scores `arguments["answer"]`; a missing answer counts as an empty one, as in verl."""
        answer = arguments.get("answer", "")
        if not isinstance(answer, str):
            answer = str(answer)
        async with self._turn:
            checked = self._check(answer, self._ground_truth)
            reward = await checked if inspect.isawaitable(checked) else checked
            improved = reward > self._previous
            self._previous = reward
        return ToolResult(
            content=f"Current parsed {answer=} {reward=}",
            reward=0.0 if improved else _NO_IMPROVEMENT,
        )

    async def aclose(self) -> None:
        """Nothing to free."""
