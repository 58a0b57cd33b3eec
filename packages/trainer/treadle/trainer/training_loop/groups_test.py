import dataclasses
import pickle
import statistics
from collections.abc import Sequence

import numpy as np
import pytest

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    FloatArray,
    GenerationTimeoutError,
    Image,
    Message,
    PlacedImage,
    SampleReward,
    StopReason,
    TokenChunk,
    Tokens,
    Trajectory,
    TrajectoryTimeoutError,
    Transcript,
)
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.trainer.training_loop.groups import (
    Group,
    NoGroupLeftError,
    StepBatch,
    groups_of,
    make_batch,
    survivors_of,
)


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


def _batch(trajectories: Sequence[Trajectory], **algorithm: object) -> StepBatch:
    config = AlgorithmConfig.model_validate({"advantage": "dr_grpo", **algorithm})
    return make_batch(groups_of(trajectories), find_estimator(config), version=3)


def test_a_trajectory_becomes_a_sequence_with_its_advantage_on_every_token() -> None:
    batch = _batch([_good(0, 0, 1.0), _good(0, 1, 0.0)])
    first, second = batch.sequences
    assert first.ids == (1, 2, 7, 8)
    assert first.loss_mask == (False, False, True, True)
    assert first.rollout_logprobs is not None
    assert first.rollout_logprobs[2:] == (-0.5, -0.25)
    assert first.advantages == 0.5
    assert second.advantages == -0.5


def test_equal_images_become_one_object_so_that_they_travel_once() -> None:
    def seen(row: int, sample: int) -> Trajectory:
        image = Image(data=b"\x89PNG" + bytes(100_000), mime="image/png")  # read once per sample
        transcript = Transcript(
            [1, 5, 5, 2], images=[PlacedImage(image=image, start=1, num_tokens=2)]
        )
        chunk = TokenChunk(token_ids=(7,), logprobs=(-0.5,), weight_version=3)
        transcript.sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
        return dataclasses.replace(
            _good(row, sample, float(sample)), samples=(transcript.freeze(),)
        )

    batch = _batch([seen(0, 0), seen(0, 1), seen(1, 0), seen(1, 1)])
    assert [s.images[0].start for s in batch.sequences] == [1] * 4
    assert len({id(s.images[0].image) for s in batch.sequences}) == 1
    assert len(pickle.dumps(batch.sequences)) < 150_000


def test_what_older_weights_had_a_part_in_is_marked_to_the_end_of_its_completion() -> None:
    transcript = Transcript([1, 2])
    old = TokenChunk(token_ids=(7,), logprobs=(-0.5,), weight_version=2)
    new = TokenChunk(token_ids=(8,), logprobs=(-0.5,), weight_version=3)
    transcript.sample(Completion(chunks=(old, new), finish=FinishReason.STOP))
    transcript.observe([9])
    transcript.sample(Completion(chunks=(new,), finish=FinishReason.STOP))
    mixed = dataclasses.replace(_good(0, 0, 1.0), samples=(transcript.freeze(),))
    first, second = _batch([mixed, _good(0, 1, 0.0)]).sequences
    assert first.stale == (False, False, True, True, False, False)
    assert second.stale is None


def test_a_group_goes_on_without_its_failed_trajectories() -> None:
    batch = _batch(
        [_good(0, 0, 1.0), _bad(0, 1), _good(0, 2, 0.0), _good(1, 0, 1.0), _good(1, 1, 1.0)]
    )
    assert [s.advantages for s in batch.sequences] == [0.5, -0.5, 0.0, 0.0]
    assert (batch.num_failed, batch.num_dropped_groups, batch.num_groups_with_signal) == (1, 0, 1)
    assert batch.causes == ("1 x GenerationTimeoutError, as: too late",)


def test_a_lone_survivor_has_nothing_to_be_compared_with() -> None:
    batch = _batch(
        [_good(0, 0, 1.0), _bad(0, 1), _good(1, 0, 1.0), _good(1, 1, 0.0)], advantage="grpo"
    )
    assert len(batch.sequences) == 2
    assert batch.metrics()["groups/dropped"] == 1


def test_a_trajectory_of_which_nothing_was_sampled_is_compared_but_not_trained_on() -> None:
    silent = dataclasses.replace(_good(0, 1, 0.0), samples=(Transcript([1, 2]).freeze(),))
    (sequence,) = _batch([_good(0, 0, 1.0), silent]).sequences
    assert sequence.advantages == 0.5
    with pytest.raises(NoGroupLeftError, match=r"none of the 2 .* has a sampled token"):
        _batch([silent, silent])


def test_a_trajectory_of_many_samples_is_one_member_of_its_group() -> None:
    """As verl's test_multi_trajectories_advantage: statistics over trajectories, not samples."""
    batch = _batch(
        [
            _good(0, 0, 1.0, num_samples=3),
            _good(0, 1, 0.0),
            _good(0, 2, 0.0),
            _good(1, 0, 1.0),
            _good(1, 1, 0.0, num_samples=2),
        ]
    )
    third = 1 / 3
    assert [s.advantages for s in batch.sequences[:3]] == [pytest.approx(2 / 3)] * 3
    assert [s.advantages for s in batch.sequences[3:5]] == pytest.approx([-third, -third])
    assert [s.advantages for s in batch.sequences[5:]] == [0.5, -0.5, -0.5]
    assert [s.trajectory for s in batch.sequences] == [0, 0, 0, None, None, None, 4, 4]
    assert batch.metrics()["groups/trained"] == 2
    assert batch.metrics()["sequences/trained"] == 8


def test_values_of_a_critic_become_advantages_and_returns_of_each_token() -> None:
    """GAE with lambda 1 and gamma 1/2, written out."""
    silent = Transcript([1, 2]).freeze()
    both = dataclasses.replace(_good(0, 0, 1.0), samples=(_sample(), silent, _sample()))
    groups = groups_of([both, _bad(0, 1), _good(1, 0, 0.0)])
    estimator = find_estimator(AlgorithmConfig(advantage="gae", gamma=0.5))
    survivors = survivors_of(groups, estimator, version=3)
    assert [s.ids for s in survivors.sequences] == [(1, 2, 7, 8)] * 3
    values = [
        FloatArray(each)
        for each in ((9.0, 9.0, 0.25, 0.5), (9.0, 9.0, 0.0, 0.0), (9.0, 9.0, 0.5, 0.25))
    ]
    batch = survivors.with_values(values).batch(estimator)
    assert [s.values for s in batch.sequences] == values
    # The return of a token is the reward times 1/2 per sampled token after it.
    assert [s.returns for s in batch.sequences] == [(0.0, 0.0, 0.5, 1.0)] * 2 + [(0.0,) * 4]
    raw = np.array([0.25, 0.5, 0.5, 1.0, -0.5, -0.25])
    white = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    got = [a for s in batch.sequences for a in s.at_loss_tokens("advantages").tolist()]
    assert got == pytest.approx(white.tolist(), abs=1e-6)
    assert batch.advantages == pytest.approx((white[:4].mean(), white[4:].mean()))
    metrics = batch.metrics()
    returns = np.array([0.5, 1.0, 0.5, 1.0, 0.0, 0.0])
    assert metrics["critic/returns_mean"] == pytest.approx(returns.mean())
    assert metrics["critic/values_mean"] == pytest.approx(0.25)
    assert metrics["critic/vf_explained_var"] == pytest.approx(1 - raw.var() / returns.var())


def test_samples_of_which_nothing_was_sampled_are_left_out() -> None:
    silent = Transcript([1, 2]).freeze()
    mixed = dataclasses.replace(_good(0, 0, 1.0), samples=(silent, _sample(), silent))
    batch = _batch([mixed, _good(0, 1, 0.0)])
    assert [s.advantages for s in batch.sequences] == [0.5, -0.5]


def test_a_straggler_is_counted_and_its_group_trained_without_it() -> None:
    late = Trajectory.failed(_task(0, 1), TrajectoryTimeoutError("600 s"))
    batch = _batch([_good(0, 0, 1.0), late, _good(0, 2, 0.0), _good(1, 0, 1.0), _bad(1, 1)])
    assert [s.advantages for s in batch.sequences] == [0.5, -0.5]
    metrics = batch.metrics()
    assert (metrics["groups/stragglers"], metrics["groups/incomplete"]) == (1, 1)
    assert metrics["groups/dropped"] == 1


def test_groups_of_one_are_trained_on_where_all_are() -> None:
    assert len(_batch([_good(0, 0, 1.0), _good(1, 0, 0.0)], advantage="grpo").sequences) == 2


def test_a_step_without_any_group_says_what_happened() -> None:
    with pytest.raises(NoGroupLeftError, match=r"3 of 4 failed.*3 x GenerationTimeoutError"):
        _batch([_good(0, 0, 1.0), _bad(0, 1), _bad(1, 0), _bad(1, 1)], advantage="grpo")


def test_what_is_not_trained_on_has_no_advantage() -> None:
    trajectories = [
        *(_good(0, 0, 1.0), _bad(0, 1), _good(0, 2, 0.0)),
        *(_good(1, 0, 1.0), _bad(1, 1), _bad(1, 2)),
    ]
    assert _batch(trajectories).advantages_of(trajectories) == [0.5, None, -0.5, *[None] * 3]
    assert _batch([_good(0, 0, 0.75)]).advantages == (0.75,)


def test_an_estimator_that_compares_nothing_needs_one_survivor() -> None:
    trajectories = [_good(0, 0, 1.0), _bad(0, 1), _good(1, 0, 0.0), _good(1, 1, 0.0)]
    assert _batch(trajectories).advantages == (0.0, 0.0)
    whitened = _batch(trajectories, advantage="reinforce_plus_plus")
    # Two tokens each: mean 1/3, unbiased variance (2 * (2/3)^2 + 4 * (1/3)^2) / 5 = 4/15.
    high, low = (2 / 3) / (4 / 15) ** 0.5, (-1 / 3) / (4 / 15) ** 0.5
    assert whitened.num_dropped_groups == 0
    assert whitened.advantages == pytest.approx((high, low, low))


def test_a_discounted_return_differs_within_a_trajectory() -> None:
    batch = _batch(
        [_good(0, 0, 1.0, num_samples=2), _good(0, 1, 0.0)],
        advantage="reinforce_plus_plus",
        gamma=0.5,
    )
    # Returns of the sampled tokens: 0.5, 1 in each of two samples, and 0, 0.
    returns = [0.5, 1.0, 0.5, 1.0, 0.0, 0.0]
    std = (sum((r - 0.5) ** 2 for r in returns) / 5) ** 0.5
    first, second, third = batch.sequences
    assert first.advantages == second.advantages == pytest.approx((0.0, 0.0, 0.0, 0.5 / std))
    assert third.advantages == pytest.approx((0.0, 0.0, -0.5 / std, -0.5 / std))
    assert batch.advantages == pytest.approx((0.25 / std, -0.5 / std))


def test_a_row_whose_greedy_trajectory_failed_is_dropped() -> None:
    row = (_good(0, 0, 1.0), _good(0, 1, 0.0))
    groups = [Group(trajectories=row, greedy=0.25), Group(trajectories=row)]
    estimator = find_estimator(AlgorithmConfig(advantage="remax"))
    batch = make_batch(groups, estimator, version=3)
    assert [s.advantages for s in batch.sequences] == [0.75, -0.25]
    assert batch.num_dropped_groups == 1
    with pytest.raises(NoGroupLeftError, match="a greedy one that ended well"):
        make_batch(groups[1:], estimator, version=3)


def test_what_a_token_costs_comes_off_the_reward_before_rewards_are_compared() -> None:
    """Charges outside the loss mask are not read; both samples of a trajectory are charged."""
    trajectories = [_good(0, 0, 1.0, num_samples=2), _good(0, 1, 0.0)]
    estimator = find_estimator(AlgorithmConfig(advantage="dr_grpo"))
    survivors = survivors_of(groups_of(trajectories), estimator, version=3)
    charges = [
        np.array(each)
        for each in ((9.0, 9.0, 0.1, 0.2), (9.0, 9.0, 0.3, 0.4), (9.0, 9.0, -0.5, 0.0))
    ]
    batch = survivors.batch(estimator, charges=charges)
    # 1 - 1.0 and 0 + 0.5
    assert [s.advantages for s in batch.sequences] == pytest.approx([-0.25, -0.25, 0.25])
    assert batch.num_groups_with_signal == 1
    spread = survivors.batch(
        find_estimator(AlgorithmConfig(advantage="reinforce_plus_plus")), charges=charges
    )
    returns = [0.7, 0.8, 0.3, 0.6, 0.5, 0.0]
    mean, std = statistics.mean(returns), statistics.stdev(returns)
    want = [(r - mean) / std for r in returns]
    got = [a for s in spread.sequences for a in s.at_loss_tokens("advantages").tolist()]
    assert got == pytest.approx(want, abs=1e-6)


def _game(row: int, sample: int, *rewards: float, first: int = 0) -> Trajectory:
    """A game of self-play: player `first` and those after it have one sample each."""
    players = [str(first + number) for number in range(len(rewards))]
    return dataclasses.replace(
        _good(row, sample, rewards[0], num_samples=len(rewards)),
        sample_rewards=tuple(
            SampleReward(player=player, value=value)
            for player, value in zip(players, rewards, strict=True)
        ),
    )


def test_a_player_is_compared_with_itself_in_the_other_trajectories() -> None:
    # Player 0 won twice of three games; a baseline over both players would be 0 for everybody.
    batch = _batch([_game(0, 0, 1.0, -1.0), _game(0, 1, 1.0, -1.0), _game(0, 2, -1.0, 1.0)])
    found = [sequence.advantages for sequence in batch.sequences]
    third = 1 / 3
    assert found == pytest.approx([2 * third, -2 * third] * 2 + [-4 * third, 4 * third])
    assert [s.trajectory for s in batch.sequences] == [0, 0, 1, 1, 2, 2]
    assert batch.advantages == pytest.approx((0.0, 0.0, 0.0))  # of a game, over both players
    assert batch.num_groups_with_signal == 1


def test_the_order_in_which_players_began_does_not_matter() -> None:
    one = _game(0, 0, 1.0, -1.0)
    other = _game(0, 1, -1.0, 1.0)
    turned = dataclasses.replace(other, sample_rewards=other.sample_rewards[::-1])
    found = [sequence.advantages for sequence in _batch([one, turned]).sequences]
    assert found == [1.0, -1.0, 1.0, -1.0]  # the second game: player 1, who won, then player 0


def test_a_player_that_nobody_else_has_learns_nothing() -> None:
    # The second game ended before player 1 had a turn.
    batch = _batch([_game(0, 0, 1.0, -1.0), _game(0, 1, -1.0)])
    assert [sequence.advantages for sequence in batch.sequences] == [1.0, 0.0, -1.0]


def test_all_samples_of_a_player_have_its_advantage() -> None:
    game = dataclasses.replace(
        _good(0, 0, 1.0, num_samples=3),
        sample_rewards=(
            SampleReward(player="a", value=1.0),
            SampleReward(player="a", value=1.0),
            SampleReward(player="b", value=-1.0),
        ),
    )
    other = dataclasses.replace(_game(0, 1, 0.0, 0.0), sample_rewards=game.sample_rewards[1:])
    lost = tuple(dataclasses.replace(each, value=0.0) for each in other.sample_rewards)
    batch = _batch([game, dataclasses.replace(other, sample_rewards=lost)])
    assert [s.advantages for s in batch.sequences] == [0.5, 0.5, -0.5, -0.5, 0.5]


def test_values_per_token_know_the_players_too() -> None:
    games = [_game(0, 0, 1.0, -1.0), _game(0, 1, -1.0, 1.0)]
    batch = _batch(games, advantage="reinforce_plus_plus", gamma=0.5)
    won, lost, *rest = (sequence.advantages for sequence in batch.sequences)
    assert isinstance(won, FloatArray) and isinstance(lost, FloatArray)
    assert won[2:] == tuple(-value for value in lost[2:])
    assert rest == [lost, won]


def test_a_greedy_reward_is_no_baseline_of_players() -> None:
    config = AlgorithmConfig.model_validate({"advantage": "remax"})
    groups = groups_of([_game(0, 0, 1.0, -1.0)], {"train/0": 0.5})
    with pytest.raises(ValueError, match="have a reward for each player: use an estimator"):
        make_batch(groups, find_estimator(config), version=3)
