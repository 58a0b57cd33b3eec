"""What a step trains on, with rows whose rewards are known, over a context that samples nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    AgentTask,
    Completion,
    FinishReason,
    Message,
    RewardError,
    SampleReward,
    StopReason,
    TokenChunk,
    Trajectory,
    Transcript,
)
from treadle.policy.algorithms.estimators import FoundEstimator, find_estimator
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.tracing import Metric
from treadle.trainer.config.schema import Config, RewardConfig
from treadle.trainer.report import rollout_metrics
from treadle.trainer.rollout.outages import OutageError
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.shaping import shaped
from treadle.trainer.training_loop.context import TrainingContext
from treadle.trainer.training_loop.gather import StepGroups, gather, has_signal
from treadle.trainer.training_loop.groups import Group, NoGroupLeftError, is_trainable, make_batch
from treadle.trainer.training_loop.run_record import Sampled

_PROMPTS = 3


def _config(**algorithm: object) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "/m"},
            "data": {"train_files": ["/t.jsonl"], "prompts_per_step": _PROMPTS},
            "algorithm": algorithm,
            "rollout": {"samples_per_prompt": 2, "response_length": 10},
            "schedule": {"val_every": None},
        }
    )


def _trajectory(
    task: AgentTask, reward: float, *, tokens: int = 1, metrics: tuple[Metric, ...] = ()
) -> Trajectory:
    transcript = Transcript([1])
    chunk = TokenChunk(token_ids=(7,) * tokens, logprobs=(-0.5,) * tokens, weight_version=0)
    transcript.sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
    return Trajectory(
        task=task,
        samples=(transcript.freeze(),),
        messages=(),
        stop=StopReason.FINISHED,
        reward=reward,
        metrics=metrics,
    )


def _task(batch: int, row: int, sample: int) -> AgentTask:
    return AgentTask(
        task_id=f"train/{batch}.{row}",
        sample_index=row,
        rollout_index=sample,
        loop="single_turn_agent",
        messages=(Message(role="user", content="?"),),
    )


@dataclass
class _Context:
    """Row r of batch b has signal if `signal` says so; nothing of a context besides is read.

    None: all of its trajectories but the first fail. `greedy_fails`: the reward is down for all
    greedy trajectories, and did not serve again in time.
    """

    config: Config
    signal: Sequence[Sequence[bool | None]]
    batches: int = 0
    surplus: Sequence[Group] = ()
    notes: list[str] = field(default_factory=list)
    greedy_fails: bool = False

    @property
    def total_steps(self) -> int | None:
        return self.config.schedule.total_steps

    def __post_init__(self) -> None:
        unused = cast(Any, None)
        self.rollout = Rollout(
            config=self.config, servers=unused, renderer=unused, rules=unused, reward=unused
        )

    @property
    def estimator(self) -> FoundEstimator:
        return find_estimator(self.config.algorithm)

    def train_tasks(self, batch: int) -> list[AgentTask]:
        return [_task(batch, row, sample) for row in range(_PROMPTS) for sample in range(2)]

    async def sample(self, phase: str, tasks: Sequence[AgentTask], *, step: int) -> Sampled:
        sampled = []
        for task in tasks:
            batch = int(task.task_id.split("/")[1].split(".")[0])
            signal = self.signal[(batch - 1) % len(self.signal)][task.sample_index]
            lost = signal is None and task.rollout_index > 0
            if lost or (self.greedy_fails and phase == "greedy"):
                sampled.append(Trajectory.failed(task, RewardError("the judge is down")))
            else:
                reward = float(bool(signal) and task.rollout_index == 0)
                sampled.append(_trajectory(task, 0.25 if phase == "greedy" else reward))
        for trajectory in sampled:
            self.rollout.outages.count(trajectory)
        if self.greedy_fails and phase == "greedy":
            self.rollout.outages.given_up.add("the reward")  # as after a wait in vain
        return Sampled(trajectories=sampled, spans=())

    @property
    def record(self) -> "_Context":
        """Takes the notes, too."""
        return self

    def note(self, step: int, text: str) -> None:
        self.notes.append(text)


def _gather(context: _Context, step: int, *, keep_surplus: bool = True) -> StepGroups:
    return asyncio.run(gather(cast(TrainingContext, context), step, keep_surplus=keep_surplus))


def _ids(groups: Sequence[Group]) -> list[str]:
    return [group.trajectories[0].task.task_id.removeprefix("train/") for group in groups]


def test_groups_without_signal_are_replaced_and_the_rest_is_kept() -> None:
    context = _Context(
        _config(dynamic_sampling="reward"),
        [(True, False, False), (True, True, True), (True, True, False)],
    )
    first = _gather(context, 1)
    assert _ids(first.groups) == ["1.0", "2.0", "2.1"]
    assert _ids(context.surplus) == ["2.2"]
    assert len(first.trajectories) == 12
    assert first.metrics == {
        "data/batches": 2,
        "sampling/batches": 2,
        "sampling/groups_replaced": 2,
        "sampling/groups_failed": 0,
        "sampling/groups_missing": 0,
        "sampling/surplus_used": 0,
        "sampling/surplus": 1,
        "sampling/surplus_given_up": 0,
    }
    second = _gather(context, 2)
    assert _ids(second.groups) == ["2.2", "3.0", "3.1"]
    assert second.metrics["sampling/surplus_used"] == 1


def test_at_the_bound_groups_without_signal_fill_the_step() -> None:
    context = _Context(
        _config(dynamic_sampling="reward", max_generation_batches=2), [(False, True, False)]
    )
    found = _gather(context, 1)
    assert _ids(found.groups) == ["1.1", "2.1", "1.0"]
    assert found.metrics["sampling/groups_missing"] == 1
    assert (
        "1 of 3 groups have no signal after algorithm.max_generation_batches=2" in context.notes[0]
    )


def test_groups_lost_to_failures_are_replaced_and_said() -> None:
    context = _Context(_config(dynamic_sampling="reward"), [(None, True, None)])
    found = _gather(context, 1)
    assert _ids(found.groups) == ["1.1", "2.1", "3.1"]
    assert found.metrics["sampling/groups_failed"] == 6
    assert found.metrics["sampling/groups_replaced"] == 0
    assert found.metrics["sampling/groups_missing"] == 0
    assert context.notes == [
        "6 trajectories failed in groups that are left out; 6 groups are left out because of them\n"
        "  6 x RewardError, as: the judge is down"
    ]


def test_at_the_bound_groups_lost_to_failures_fill_no_place() -> None:
    config = _config(dynamic_sampling="reward", max_generation_batches=1)
    context = _Context(config, [(None, True, False)])
    found = _gather(context, 1)
    assert _ids(found.groups) == ["1.1", "1.2"]
    assert found.metrics["sampling/groups_missing"] == 2
    assert (found.metrics["sampling/groups_failed"], len(context.notes)) == (1, 2)
    assert context.notes[0] == (
        "1 of 3 groups have no signal and 1 of 3 places are empty after "
        "algorithm.max_generation_batches=1 batches of rows"
    )
    batch = make_batch(found.groups, context.estimator, version=0)
    assert (batch.num_groups, batch.num_dropped_groups) == (2, 0)


def test_a_step_of_which_failures_leave_nothing_says_how_they_failed() -> None:
    config = _config(dynamic_sampling="reward", max_generation_batches=2)
    context = _Context(config, [(None, None, None)])
    found = _gather(context, 1)
    with pytest.raises(
        NoGroupLeftError,
        match=r"none of 6 groups has 2 .* \(6 of 12 failed\): 6 x RewardError, as: the judge",
    ):
        make_batch(found.groups, context.estimator, version=0)


def test_without_dynamic_sampling_a_step_is_its_batch_of_rows() -> None:
    context = _Context(_config(), [(False, True, False)])
    found = _gather(context, 7)
    assert _ids(found.groups) == ["7.0", "7.1", "7.2"]
    assert (found.metrics, context.batches) == ({}, 7)


_TOTAL_STEPS = 6
_Trained = tuple[list[str], dict[str, float]]
"""Of a step: its groups, and its metrics."""


class _SyncRun:
    """A run of `schedule.kind=sync` without processes, move by move.

    The data cursor and the surplus are those of the real `gather`; a checkpoint has the metrics of
    its step, and nothing else of them.
    """

    def __init__(self, config: Config, signal: Sequence[Sequence[bool | None]]) -> None:
        self._config, self._signal = config, signal
        self._kept = (0, 0, dict[int, _Trained]())
        self.resume()

    def resume(self) -> None:
        """Begins, or is killed and begins again from its latest checkpoint."""
        step, batches, trained = self._kept
        self.trained, self._step = dict(trained), step + 1
        self._context = _Context(self._config, self._signal, batches=batches)
        self._found: StepGroups | None = None

    @property
    def ended(self) -> bool:
        """Whether all steps are trained."""
        return self._step > _TOTAL_STEPS

    def move(self) -> None:
        """Samples, trains, or ends a step, which may save a checkpoint."""
        if self._found is None:
            self._found = self._sample()
        elif self._step not in self.trained:
            self.trained[self._step] = (_ids(self._found.groups), self._found.metrics)
        else:
            if self._saves:
                batches = int(self._found.metrics.get("data/batches", self._step))
                self._kept = (self._step, batches, dict(self.trained))
            self._step, self._found = self._step + 1, None

    @property
    def _saves(self) -> bool:
        last = self._step == self._context.total_steps
        return self._config.schedule.saves(self._step, last=last)

    def _sample(self) -> StepGroups:
        context, before = self._context, self._context.batches
        found = _gather(context, self._step, keep_surplus=not self._saves)
        batches = {int(t.task.task_id[6:].split(".")[0]) for t in found.trajectories}
        # Every batch of rows, in order, and each of them whole.
        assert sorted(batches) == list(range(before + 1, context.batches + 1))
        assert len(found.trajectories) == len(batches) * 2 * _PROMPTS
        assert len(context.surplus) < _PROMPTS
        trainable = [is_trainable(group, context.estimator) for group in found.groups]
        if any(trainable) and self._config.algorithm.dynamic_sampling:
            lost = found.metrics["sampling/groups_failed"]
            assert all(trainable)
            assert len(trainable) == _PROMPTS if not lost else len(trainable) <= _PROMPTS
        return found


@settings(max_examples=40, deadline=None)
@given(
    signal=st.lists(
        st.tuples(*[st.sampled_from([True, True, False, None])] * _PROMPTS), min_size=1, max_size=8
    ),
    bound=st.one_of(st.none(), st.integers(1, 4)),
    every=st.integers(1, 3),
    lives=st.lists(st.integers(0, 3 * _TOTAL_STEPS), max_size=4),
)
def test_a_run_that_is_killed_between_its_moves_trains_what_an_undisturbed_one_does(
    signal: list[tuple[bool | None, ...]], bound: int | None, every: int, lives: list[int]
) -> None:
    algorithm = {"dynamic_sampling": "reward", "max_generation_batches": bound} if bound else {}
    config = _config(**algorithm)
    of_run = {"save_every": every, "total_steps": _TOTAL_STEPS}
    schedule = config.schedule.model_copy(update=of_run)
    config = config.model_copy(update={"schedule": schedule})
    undisturbed, killed = _SyncRun(config, signal), _SyncRun(config, signal)
    for moves in lives:
        for _ in range(moves):
            if not killed.ended:
                killed.move()
        killed.resume()
    for run in (undisturbed, killed):
        while not run.ended:
            run.move()
    assert killed.trained == undisturbed.trained
    # No group is trained on twice.
    trained = [each for groups, _ in killed.trained.values() for each in groups]
    assert len(set(trained)) == len(trained)


def test_greedy_trajectories_are_counted_apart() -> None:
    context = _Context(_config(advantage="remax"), [(True, True, False)])
    found = _gather(context, 1)
    assert [group.greedy for group in found.groups] == [0.25] * 3
    assert len(found.trajectories) == 6
    assert found.metrics == {
        "greedy/num_trajectories": 3,
        "greedy/num_failed": 0,
        "greedy/reward": 0.25,
    }


def test_what_is_down_for_greedy_trajectories_ends_the_run() -> None:
    context = _Context(_config(advantage="remax"), [(True, True, False)], greedy_fails=True)
    with pytest.raises(OutageError, match=r"the reward failed 3 trajectories .*agent\.outage_s"):
        _gather(context, 1)
    assert "3 of 3 greedy trajectories failed" in context.notes[0]


def test_accuracy_decides_where_every_reward_tells_it() -> None:
    def group(*rewards: float, metrics: tuple[Metric, ...] = ()) -> Group:
        return Group(
            trajectories=tuple(
                _trajectory(_task(1, 0, n), r, metrics=metrics) for n, r in enumerate(rewards)
            )
        )

    right = (Metric("reward/accuracy", 1.0),)
    assert not has_signal(group(0.9, 0.8, metrics=right), by="accuracy")
    assert has_signal(group(0.9, 0.8, metrics=right), by="reward")
    assert has_signal(group(0.9, 0.8), by="accuracy")  # nothing tells: the rewards decide
    assert not has_signal(group(0.1 + 0.2, 0.3), by="reward")
    assert not group(0.1 + 0.2, 0.3).players_differ


def test_length_costs_reward_and_hides_no_right_answer() -> None:
    reward = SimpleNamespace(overlong_penalty=1.0)
    config = cast(
        Config,
        SimpleNamespace(
            reward=reward, overlong_buffer=4, rollout=SimpleNamespace(response_length=10)
        ),
    )
    long = shaped(_trajectory(_task(1, 0, 0), 1.0, tokens=8), config)
    assert long.reward == pytest.approx(0.5)
    assert long.metrics == (Metric("reward/overlong_penalty", -0.5), Metric("reward/accuracy", 1.0))
    short = shaped(_trajectory(_task(1, 0, 0), 1.0, tokens=6), config)
    assert short.reward == 1.0
    reward.overlong_penalty = 0.0
    plain = _trajectory(_task(1, 0, 0), 1.0, tokens=10)
    assert shaped(plain, config) is plain


@pytest.mark.parametrize("name", ["reward/accuracy", "reward/acc"])
def test_length_leaves_the_accuracy_that_the_reward_reported(name: str) -> None:
    """With math_dapo's values: a right answer has 1 and accuracy 1, a wrong one -1 and 0."""
    config = _config().model_copy(update={"reward": RewardConfig(overlong_penalty=1.0)})
    given = [
        _trajectory(_task(1, 0, n), reward, tokens=10, metrics=(Metric(name, right),))
        for n, (reward, right) in enumerate([(1.0, 1.0), (1.0, 1.0), (-1.0, 0.0), (-1.0, 0.0)])
    ]
    after = [shaped(trajectory, config) for trajectory in given]
    assert [t.reward for t in after] == [0.0, 0.0, -2.0, -2.0]
    metrics = rollout_metrics(after)
    assert {key: metrics[key] for key in metrics if key.startswith("reward/acc")} == {name: 0.5}


def test_the_defaults_shape_nothing() -> None:
    assert AlgorithmConfig().dynamic_sampling is None
    assert _config().reward.overlong_penalty == 0


def test_length_costs_the_player_who_was_long() -> None:
    reward = SimpleNamespace(overlong_penalty=1.0)
    config = cast(
        Config,
        SimpleNamespace(
            reward=reward, overlong_buffer=4, rollout=SimpleNamespace(response_length=10)
        ),
    )
    long, short = (_trajectory(_task(1, 0, 0), 1.0, tokens=tokens) for tokens in (8, 2))
    game = replace(
        long,
        samples=(*long.samples, *short.samples),
        sample_rewards=(
            SampleReward(player="0", value=1.0),
            SampleReward(player="1", value=-1.0),
        ),
    )
    assert [each.value for each in shaped(game, config).sample_rewards] == [0.5, -1.0]


def test_players_that_won_differently_are_a_signal_whatever_is_reported() -> None:
    def game(*values: float) -> Trajectory:
        one = _trajectory(_task(1, 0, 0), 0.0, tokens=2)
        return replace(
            one,
            samples=one.samples * 2,
            sample_rewards=tuple(
                SampleReward(player=str(p), value=v) for p, v in enumerate(values)
            ),
        )

    assert has_signal(Group(trajectories=(game(1, -1), game(-1, 1))), by="reward")
    assert not has_signal(Group(trajectories=(game(1, -1), game(1, -1))), by="reward")
