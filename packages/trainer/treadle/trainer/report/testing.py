"""Trajectories to test with: a question, a tool call and its result if wanted, an answer."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.agent_loop import (
    AgentTask,
    Message,
    Origin,
    Span,
    StopReason,
    Tokens,
    ToolCall,
    Trajectory,
)
from treadle.tracing import Metric

QUESTION = Message(role="user", content="What is 6 * 7?")
_CALL = ToolCall(id="0", name="calculator", arguments={"expression": "6*7"})


def make_task(
    task_id: str = "train/0",
    *,
    rollout_index: int = 0,
    messages: Sequence[Message] = (QUESTION,),
) -> AgentTask:
    """Returns a task with the columns that a row of the calculator data has."""
    return AgentTask(
        task_id=task_id,
        sample_index=0,
        rollout_index=rollout_index,
        loop="tool_agent",
        messages=tuple(messages),
        fields={"data_source": "treadle/calculator", "reward_model": {"ground_truth": "42"}},
    )


def make_trajectory(
    *,
    task: AgentTask | None = None,
    reward: float | None = 1.0,
    calls_tool: bool = True,
    answer: str = "#### 42",
    stop: StopReason = StopReason.FINISHED,
    metrics: Sequence[Metric] = (),
) -> Trajectory:
    """Returns a trajectory: 4 prompt tokens, 3 sampled and 5 observed with a call, 2 sampled.

    The ids count up from 0; sampled tokens have weight version 1 and log-probability -0.5.
    """
    task = task or make_task()
    parts = [(Origin.PROMPT, 4)]
    messages = list(task.messages)
    if calls_tool:
        parts += [(Origin.SAMPLED, 3), (Origin.OBSERVED, 5)]
        messages.append(Message(role="assistant", content="", tool_calls=(_CALL,)))
        messages.append(Message(role="tool", content="42", name="calculator", tool_call_id="0"))
    parts.append((Origin.SAMPLED, 2))
    messages.append(Message(role="assistant", content=answer))
    return Trajectory(
        task=task,
        samples=(_tokens(parts),),
        messages=tuple(messages),
        stop=stop,
        assistant_turns=2 if calls_tool else 1,
        user_turns=int(calls_tool),
        reward=reward,
        metrics=tuple(metrics),
    )


def _tokens(parts: Sequence[tuple[Origin, int]]) -> Tokens:
    spans: list[Span] = []
    mask: list[bool] = []
    for origin, length in parts:
        sampled = origin is Origin.SAMPLED
        spans.append(
            Span(
                origin=origin,
                start=len(mask),
                stop=len(mask) + length,
                weight_version=1 if sampled else None,
            )
        )
        mask += [sampled] * length
    return Tokens(
        ids=tuple(range(len(mask))),
        logprobs=tuple(-0.5 if sampled else 0.0 for sampled in mask),
        spans=tuple(spans),
    )
