"""`Gsm8kInteraction`: a teacher who says whether the answer is right, until it is.

Invariant: a turn is scored as the GSM8K reward scores it, and a right one ends the conversation.
The texts and scores are verl's `Gsm8kInteraction`. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treadle.agent_loop import AgentTask, InteractionReply, Message, SetupError
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.arguments import truth_of
from treadle.tools.rewards import gsm8k

_RIGHT = "Your response is correct!"
_WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction:
    """Opens a session per trajectory with the ground truth of its row.

    Args:
        config: `mode`: how the answer is read, as in `rewards.gsm8k`; strict if left out.

    Raises:
        SetupError: The mode or another key is unknown.
    """

    def __init__(self, *, config: Mapping[str, object] | None = None) -> None:
        settings = dict(config or {})
        mode = settings.pop("mode", "strict")
        if settings:
            raise SetupError(
                f"{type(self).__name__} has no setting {sorted(settings)}; it has: mode"
            )
        known = {name: name for name in gsm8k.MODES}
        if not isinstance(mode, str) or mode not in known:
            raise SetupError(
                f"mode is {mode!r}{did_you_mean(str(mode), known)}; known are: {', '.join(known)}"
            )
        self._mode: gsm8k.Mode = known[mode]

    async def open(self, task: AgentTask) -> Gsm8kTeacher:
        """Begins with the ground truth in the row's `extra_info.interaction_kwargs`.

        Raises:
            SetupError: `extra_info.interaction_kwargs.ground_truth` is missing.
        """
        return Gsm8kTeacher(ground_truth=_ground_truth(task), mode=self._mode)

    def check_task(self, task: AgentTask) -> None:
        """See `treadle.agent_loop.ChecksTask`."""
        _ground_truth(task)


def _ground_truth(task: AgentTask) -> str:
    path = ("extra_info", "interaction_kwargs", "ground_truth")
    return truth_of(task, *path, needed_by="Gsm8kInteraction")


class Gsm8kTeacher:
    """Knows the answer to one row."""

    def __init__(self, *, ground_truth: str, mode: gsm8k.Mode) -> None:
        self._ground_truth = ground_truth
        self._mode = mode

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        """Scores the assistant's last text, and says whether it is right."""
        said = next(m.content for m in reversed(messages) if m.role == "assistant")
        score = gsm8k.score(said, self._ground_truth, mode=self._mode)
        right = score > 0
        return InteractionReply(content=_RIGHT if right else _WRONG, score=score, stop=right)

    async def aclose(self) -> None:
        """Nothing to free."""
