"""Groups for the tests of schedules."""

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    Message,
    StopReason,
    TokenChunk,
    Trajectory,
    Transcript,
)
from treadle.trainer.training_loop.groups import Group

SAMPLES = 2


def tasks_of(number: int) -> tuple[AgentTask, ...]:
    """Returns the tasks of a group."""
    return tuple(
        AgentTask(
            task_id=f"train/{number}",
            sample_index=number,
            rollout_index=index,
            loop="single_turn_agent",
            messages=(Message(role="user", content=f"row {number}"),),
            seed=1000 * number + index,
        )
        for index in range(SAMPLES)
    )


def trajectory_of(task: AgentTask, *, versions: tuple[int, ...], reward: float) -> Trajectory:
    """Returns a trajectory with a token of each version."""
    transcript = Transcript([1])
    chunks = tuple(
        TokenChunk(token_ids=(7,), logprobs=(-0.5,), weight_version=version) for version in versions
    )
    transcript.sample(Completion(chunks=chunks, finish=FinishReason.STOP))
    return Trajectory(
        task=task,
        samples=(transcript.freeze(),),
        messages=task.messages,
        stop=StopReason.FINISHED,
        reward=reward,
    )


def group_of(number: int, *, versions: tuple[int, ...] = (0,)) -> Group:
    """Returns a group that ended well, with signal."""
    return Group(
        trajectories=tuple(
            trajectory_of(task, versions=versions, reward=float(task.rollout_index))
            for task in tasks_of(number)
        )
    )
