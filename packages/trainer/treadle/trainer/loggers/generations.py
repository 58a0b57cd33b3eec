"""The table of a validation: what the model was asked, what it answered, and how it was scored."""

from collections.abc import Sequence
from typing import Final

from treadle.agent_loop import Message, Trajectory
from treadle.trainer.loggers.run_logger import Table
from treadle.trainer.report.rollout import accuracy, ground_truth
from treadle.trainer.report.trajectories import choose

__all__ = ["generations"]

_COLUMNS: Final = (
    "prompt",
    "answer",
    "extracted",
    "reward",
    "accuracy",
    "ground_truth",
    "data_source",
    "stop",
    "turns",
)


def generations(trajectories: Sequence[Trajectory], *, limit: int) -> Table:
    """Returns the trajectories that the trajectory log takes too: whole groups, worst to best."""
    rows = [
        (
            _text(t.task.messages),
            _text(t.messages[len(t.task.messages) :]),
            t.answer,
            t.reward,
            None if t.error is not None else accuracy(t),
            None if (truth := ground_truth(t)) is None else str(truth),
            None if (source := t.task.fields.get("data_source")) is None else str(source),
            t.stop.value if t.error is None else f"{type(t.error).__name__}: {t.error}",
            t.num_turns,
        )
        for t in choose(trajectories, limit)
    ]
    return Table(name="val/generations", columns=_COLUMNS, rows=rows)


def _text(messages: Sequence[Message]) -> str:
    """Returns the messages as text, each below its role."""
    return "\n\n".join(f"{message.role}: {_content(message)}" for message in messages)


def _content(message: Message) -> str:
    calls = (f"{call.name}({dict(call.arguments)})" for call in message.tool_calls)
    parts = (message.reasoning or "", str(message.content or ""), *calls)
    return "\n".join(part for part in parts if part)
