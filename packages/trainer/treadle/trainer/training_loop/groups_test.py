import dataclasses

import pytest

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    GenerationTimeoutError,
    Message,
    StopReason,
    TokenChunk,
    Tokens,
    Trajectory,
    TrajectoryTimeoutError,
    Transcript,
)
from treadle.trainer.training_loop.groups import NoGroupLeftError, make_batch, trajectory_advantages


def _task(row: int, sample: int) -> AgentTask:
    return AgentTask(
        task_id=f"train/{row}",
        sample_index=row,
        rollout_index=sample,
        loop="single_turn_agent",
        messages=(Message(role="user", content="?"),),
    )


def _sample() -> Tokens:
    transcript = Transcript([1, 2])
    chunk = TokenChunk(token_ids=(7, 8), logprobs=(-0.5, -0.25), weight_version=3)
    transcript.sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
    return transcript.freeze()


def _good(row: int, sample: int, reward: float, *, num_samples: int = 1) -> Trajectory:
    return Trajectory(
        task=_task(row, sample),
        samples=(_sample(),) * num_samples,
        messages=(),
        stop=StopReason.FINISHED,
        reward=reward,
    )


def _bad(row: int, sample: int) -> Trajectory:
    return Trajectory.failed(_task(row, sample), GenerationTimeoutError("too late"))


def test_a_trajectory_becomes_a_sequence_with_its_advantage_on_every_token() -> None:
    batch = make_batch([_good(0, 0, 1.0), _good(0, 1, 0.0)], norm_by_std=False, version=3)
    first, second = batch.sequences
    assert first.ids == (1, 2, 7, 8)
    assert first.loss_mask == (False, False, True, True)
    assert first.rollout_logprobs is not None
    assert first.rollout_logprobs[2:] == (-0.5, -0.25)
    assert first.advantages == (0.5,) * 4
    assert second.advantages == (-0.5,) * 4


def test_what_older_weights_had_a_part_in_is_marked_to_the_end_of_its_completion() -> None:
    transcript = Transcript([1, 2])
    old = TokenChunk(token_ids=(7,), logprobs=(-0.5,), weight_version=2)
    new = TokenChunk(token_ids=(8,), logprobs=(-0.5,), weight_version=3)
    transcript.sample(Completion(chunks=(old, new), finish=FinishReason.STOP))
    transcript.observe([9])
    transcript.sample(Completion(chunks=(new,), finish=FinishReason.STOP))
    mixed = dataclasses.replace(_good(0, 0, 1.0), samples=(transcript.freeze(),))
    first, second = make_batch([mixed, _good(0, 1, 0.0)], norm_by_std=False, version=3).sequences
    assert first.stale == (False, False, True, True, False, False)
    assert second.stale is None


def test_a_group_goes_on_without_its_failed_trajectories() -> None:
    batch = make_batch(
        [_good(0, 0, 1.0), _bad(0, 1), _good(0, 2, 0.0), _good(1, 0, 1.0), _good(1, 1, 1.0)],
        norm_by_std=False,
        version=3,
    )
    assert [s.advantages[0] for s in batch.sequences] == [0.5, -0.5, 0.0, 0.0]
    assert (batch.num_failed, batch.num_dropped_groups, batch.num_groups_with_signal) == (1, 0, 1)
    assert batch.causes == ("1 x GenerationTimeoutError, as: too late",)


def test_a_lone_survivor_has_nothing_to_be_compared_with() -> None:
    batch = make_batch(
        [_good(0, 0, 1.0), _bad(0, 1), _good(1, 0, 1.0), _good(1, 1, 0.0)],
        norm_by_std=True,
        version=3,
    )
    assert len(batch.sequences) == 2
    assert batch.metrics()["groups/dropped"] == 1


def test_a_trajectory_of_which_nothing_was_sampled_is_compared_but_not_trained_on() -> None:
    silent = dataclasses.replace(_good(0, 1, 0.0), samples=(Transcript([1, 2]).freeze(),))
    (sequence,) = make_batch([_good(0, 0, 1.0), silent], norm_by_std=False, version=3).sequences
    assert sequence.advantages[0] == 0.5
    with pytest.raises(NoGroupLeftError, match=r"none of the 2 .* has a sampled token"):
        make_batch([silent, silent], norm_by_std=False, version=3)


def test_a_trajectory_of_many_samples_is_one_member_of_its_group() -> None:
    """As verl's test_multi_trajectories_advantage: statistics over trajectories, not samples."""
    batch = make_batch(
        [
            _good(0, 0, 1.0, num_samples=3),
            _good(0, 1, 0.0),
            _good(0, 2, 0.0),
            _good(1, 0, 1.0),
            _good(1, 1, 0.0, num_samples=2),
        ],
        norm_by_std=False,
        version=3,
    )
    third = pytest.approx(1 / 3)
    assert [s.advantages[0] for s in batch.sequences[:3]] == [pytest.approx(2 / 3)] * 3
    assert [-s.advantages[0] for s in batch.sequences[3:5]] == [third, third]
    assert [s.advantages[0] for s in batch.sequences[5:]] == [0.5, -0.5, -0.5]
    assert [s.trajectory for s in batch.sequences] == [0, 0, 0, None, None, None, 4, 4]
    assert batch.metrics()["groups/trained"] == 2
    assert batch.metrics()["sequences/trained"] == 8


def test_samples_of_which_nothing_was_sampled_are_left_out() -> None:
    silent = Transcript([1, 2]).freeze()
    mixed = dataclasses.replace(_good(0, 0, 1.0), samples=(silent, _sample(), silent))
    batch = make_batch([mixed, _good(0, 1, 0.0)], norm_by_std=False, version=3)
    assert [s.advantages[0] for s in batch.sequences] == [0.5, -0.5]


def test_a_straggler_is_counted_and_its_group_trained_without_it() -> None:
    late = Trajectory.failed(_task(0, 1), TrajectoryTimeoutError("600 s"))
    batch = make_batch(
        [_good(0, 0, 1.0), late, _good(0, 2, 0.0), _good(1, 0, 1.0), _bad(1, 1)],
        norm_by_std=False,
        version=3,
    )
    assert [s.advantages[0] for s in batch.sequences] == [0.5, -0.5]
    metrics = batch.metrics()
    assert (metrics["groups/stragglers"], metrics["groups/incomplete"]) == (1, 1)
    assert metrics["groups/dropped"] == 1


def test_groups_of_one_are_trained_on_where_all_are() -> None:
    assert (
        len(make_batch([_good(0, 0, 1.0), _good(1, 0, 0.0)], norm_by_std=True, version=3).sequences)
        == 2
    )


def test_a_step_without_any_group_says_what_happened() -> None:
    with pytest.raises(NoGroupLeftError, match=r"3 of 4 failed.*3 x GenerationTimeoutError"):
        make_batch(
            [_good(0, 0, 1.0), _bad(0, 1), _bad(1, 0), _bad(1, 1)], norm_by_std=True, version=3
        )


def test_what_is_not_trained_on_has_no_advantage() -> None:
    trajectories = [
        *(_good(0, 0, 1.0), _bad(0, 1), _good(0, 2, 0.0)),
        *(_good(1, 0, 1.0), _bad(1, 1), _bad(1, 2)),
    ]
    advantages = trajectory_advantages(trajectories, norm_by_std=False)
    assert advantages == [0.5, None, -0.5, None, None, None]
    alone = trajectory_advantages([_good(0, 0, 0.75)], norm_by_std=False)
    assert alone == [0.75]
