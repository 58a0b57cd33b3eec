from collections.abc import Mapping

import pytest

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    SetupError,
    StopReason,
    Trajectory,
)
from treadle.tools import rewards


def make_trajectory(
    answer: str = "#### 42", *, fields: Mapping[str, object] | None = None
) -> Trajectory:
    if fields is None:
        fields = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "42"}}
    question = Message(role="user", content="How many?")
    task = AgentTask(
        task_id="train/7",
        sample_index=7,
        rollout_index=0,
        loop="single_turn_agent",
        messages=(question,),
        fields=fields,
    )
    return Trajectory(
        task=task,
        samples=(),
        messages=(question, Message(role="assistant", content=answer)),
        stop=StopReason.FINISHED,
        assistant_turns=1,
    )


@pytest.mark.parametrize(("mode", "reward"), [("strict", 0.0), ("flexible", 0.0), ("fixed", 1.0)])
def test_a_reward_by_name_reads_the_last_message_in_its_mode(mode: str, reward: float) -> None:
    assert rewards.get("gsm8k", mode=mode)(make_trajectory("#### 42.")) == reward
    assert rewards.by_data_source(mode=mode)(make_trajectory("#### 42.")) == reward


def test_the_default_mode_is_strict() -> None:
    assert rewards.get("gsm8k")(make_trajectory("42")) == 0.0
    assert rewards.resolve(None)(make_trajectory("#### 42")) == 1.0
    assert rewards.resolve("gsm8k", mode="flexible")(make_trajectory("42")) == 1.0


def test_an_unknown_name_or_mode_is_found_at_lookup() -> None:
    with pytest.raises(SetupError, match=r"no reward 'gsm8', did you mean 'gsm8k'\?"):
        rewards.get("gsm8")
    with pytest.raises(SetupError, match="no reward mode 'lax'; there are: strict, flexible, fix"):
        rewards.get("gsm8k", mode="lax")
    with pytest.raises(SetupError, match="no reward mode"):
        rewards.by_data_source(mode="lax")


def test_data_sources_can_be_checked_before_the_first_step() -> None:
    rewards.check_data_sources(["openai/gsm8k", "treadle/calculator", "openai/gsm8k"])
    with pytest.raises(SetupError, match=r"'openai/gsmk', did you mean 'openai/gsm8k'\?"):
        rewards.check_data_sources(["openai/gsm8k", "openai/gsmk"])


def test_every_data_source_has_a_reward_that_exists() -> None:
    for source in rewards.DATA_SOURCES:
        fields = {"data_source": source, "reward_model": {"ground_truth": "42"}}
        assert rewards.by_data_source()(make_trajectory(fields=fields)) == 1.0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "data_source None"),
        ({"data_source": "mine"}, "data_source 'mine'"),
        ({"data_source": "openai/gsm8k"}, "ground_truth must be a string, not None"),
        (
            {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": 42}},
            "ground_truth must be a string, not 42",
        ),
    ],
)
def test_a_row_that_cannot_be_scored_fails_its_trajectory_by_name(
    fields: Mapping[str, object], why: str
) -> None:
    with pytest.raises(RewardError, match=rf"'train/7'.*{why}"):
        rewards.by_data_source()(make_trajectory(fields=fields))
