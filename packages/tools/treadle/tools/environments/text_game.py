"""Plays an environment that speaks in text: what it shows is the user's message of a turn.

Invariant: the environment is closed however its trajectory ends. An error in it fails the attempt,
never the run. The reward is the sum of what its steps gave, also if a limit ended the trajectory
before the environment did; `environment/finished` is the share that it ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from treadle.agent_loop import (
    AgentTask,
    Conversation,
    LoopLimits,
    Message,
    Services,
    StopReason,
    Trajectory,
)
from treadle.tracing import Metric, span


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer of an environment.

    Attributes:
        done: Whether the episode is over.
    """

    shown: str
    reward: float = 0.0
    done: bool = False


class TextGame(Protocol):
    """One episode of an environment, from its start."""

    async def reset(self, seed: int) -> str:
        """Begins; returns what the model is shown first."""
        ...

    async def step(self, text: str) -> Step:
        """Takes the model's turn."""
        ...

    async def aclose(self) -> None:
        """Ends the episode."""
        ...


async def play(task: AgentTask, services: Services, game: TextGame, *, seed: int) -> Trajectory:
    """Plays one episode to its end.

    Args:
        task: Its messages but the last one, which the environment's first text replaces, begin the
            conversation.

    Raises:
        RolloutError: The attempt failed.
    """
    try:
        async with span("environment.reset", seed=seed) as trace:
            first = await game.reset(seed)
            trace.set(output=first)
        with Conversation(beginning(task, first), services) as chat:
            total = 0.0
            while True:
                if stop := await take_turn(chat):
                    return chat.finish(stop, reward=total, metrics=[ended(False)])
                chat.doing("waiting for the environment")
                async with span("environment.step") as trace:
                    step = await game.step(chat.messages[-1].content)
                    trace.set(output={"shown": step.shown, "reward": step.reward})
                total += step.reward
                if step.done:
                    return chat.finish(StopReason.FINISHED, reward=total, metrics=[ended(True)])
                shown = Message(role="user", content=step.shown)
                if stop := turn_stop(chat, services.limits) or chat.answer([shown]):
                    return chat.finish(stop, reward=total, metrics=[ended(False)])
    finally:
        await game.aclose()


def beginning(task: AgentTask, first: str) -> AgentTask:
    """Returns the task with what the environment shows first as its last message."""
    messages: Sequence[Message] = (*task.messages[:-1], Message(role="user", content=first))
    return replace(task, messages=tuple(messages))


def ended(finished: bool) -> Metric:
    """Returns the metric for the end of an episode: 1 if the environment ended it, else 0."""
    return Metric("environment/finished", float(finished))


def turn_stop(chat: Conversation, limits: LoopLimits) -> StopReason | None:
    """Returns the limit on turns, over all conversations, that the trajectory has reached."""
    return limits.turn_stop(
        assistant_turns=chat.all_assistant_turns, user_turns=chat.all_user_turns
    )


async def take_turn(chat: Conversation) -> StopReason | None:
    """Samples a turn; returns the limit that cut it, None if the model ended it."""
    turn = await chat.generate()
    return None if turn.closed else chat.length_stop() or StopReason.TURN_LENGTH
