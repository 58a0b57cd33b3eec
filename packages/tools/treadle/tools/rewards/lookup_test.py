import subprocess
import sys
from collections.abc import Awaitable, Mapping
from dataclasses import replace

import pytest

from treadle.agent_loop import (
    AgentTask,
    Message,
    RewardError,
    RewardFn,
    Score,
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


def value(reward: RewardFn, trajectory: Trajectory) -> float:
    result = reward(trajectory)
    assert isinstance(result, Score)
    return result.value


@pytest.mark.parametrize(("mode", "reward"), [("strict", 0.0), ("flexible", 0.0), ("fixed", 1.0)])
def test_a_reward_by_name_reads_the_last_message_in_its_mode(mode: str, reward: float) -> None:
    for name in ("gsm8k", None):
        assert value(rewards.resolve(name, mode=mode), make_trajectory("#### 42.")) == reward


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        ("gsm8k", "so #### 1,042", "1042"),
        ("gsm8k", "so 42", None),
        ("math_dapo", "Answer: $x = \\frac12$ units", r"\frac{1}{2}"),
        ("math_dapo", "x = 2", None),
        ("retool", r"so \boxed{0.5}", "0.5"),
        ("hotpotqa", "<answer>The Eiffel Tower!</answer>", "eiffel tower"),
    ],
)
def test_a_score_says_which_answer_was_read(name: str, text: str, answer: str | None) -> None:
    result = rewards.resolve(name)(make_trajectory(text))
    assert isinstance(result, Score)
    assert result.answer == answer


def test_the_default_mode_is_the_first_of_each_reward() -> None:
    assert value(rewards.resolve("gsm8k"), make_trajectory("42")) == 0.0
    assert value(rewards.resolve(None), make_trajectory("#### 42")) == 1.0
    assert value(rewards.resolve("gsm8k", mode="flexible"), make_trajectory("42")) == 1.0


def test_an_unknown_name_or_mode_is_found_at_lookup() -> None:
    with pytest.raises(SetupError, match=r"no reward 'gsm8', did you mean 'gsm8k'\?"):
        rewards.resolve("gsm8")
    with pytest.raises(SetupError, match="gsm8k has no mode 'lax'; it has: strict, flexible, fix"):
        rewards.resolve("gsm8k", mode="lax")
    with pytest.raises(SetupError, match="no reward mode 'lax'; there are: boxed, capped, em"):
        rewards.resolve(None, mode="lax")
    with pytest.raises(SetupError, match="'json:loads' has no modes"):
        rewards.resolve("json:loads", mode="strict")


def test_data_sources_can_be_checked_before_the_first_step() -> None:
    rewards.check_data_sources(["openai/gsm8k", "treadle/calculator", "aime_2024"])
    with pytest.raises(SetupError, match=r"'openai/gsmk', did you mean 'openai/gsm8k'\?"):
        rewards.check_data_sources(["openai/gsm8k", "openai/gsmk"])
    with pytest.raises(SetupError, match="math_dapo has no mode 'fixed'; it has: minerva, boxed"):
        rewards.check_data_sources(["openai/gsm8k", "aime_2024"], mode="fixed")


@pytest.mark.parametrize(
    ("source", "answer", "truth"),
    [
        ("openai/gsm8k", "#### 42", 42),
        ("treadle/calculator", "#### 42", "42"),
        ("math_dapo", "Answer: $42$", "42"),
        ("aime_2025", "Answer: 42", 42),
        ("searchR1_hotpotqa", "<answer>The Eiffel Tower</answer>", {"target": ["eiffel tower"]}),
        ("hotpotqa/hotpot_qa", "<answer>yes</answer>", ["yes", "true"]),
    ],
)
def test_a_row_is_scored_by_its_data_source(source: str, answer: str, truth: object) -> None:
    fields = {"data_source": source, "reward_model": {"ground_truth": truth}}
    assert value(rewards.resolve(None), make_trajectory(answer, fields=fields)) == 1.0


def test_the_data_sources_that_are_told_are_known() -> None:
    rewards.check_data_sources(source.replace("*", "x") for source in rewards.sources())


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "data_source None"),
        ({"data_source": "mine"}, "data_source 'mine'"),
        (
            {"data_source": "openai/gsm8k"},
            "must be a string or an integer, got no value",
        ),
        (
            {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": 4.2}},
            "must be a string or an integer, got a value of type float: write it as text",
        ),
        (
            {"data_source": "hotpotqa/hotpot_qa", "reward_model": {"ground_truth": []}},
            r"ground_truth must be a string, a list of strings or .*, got a value of type list",
        ),
    ],
)
def test_a_row_that_cannot_be_scored_fails_its_trajectory_by_name(
    fields: Mapping[str, object], why: str
) -> None:
    with pytest.raises(RewardError, match=rf"'train/7'.*{why}"):
        rewards.resolve(None)(make_trajectory(fields=fields))


@pytest.mark.parametrize(("turns", "stalling"), [(1, 0.0), (5, 0.0), (6, 1.0)])
def test_a_wrong_answer_after_many_tool_turns_shows_in_a_metric(
    turns: int, stalling: float
) -> None:
    wrong = replace(make_trajectory(r"\boxed{41}"), assistant_turns=turns, user_turns=turns - 1)
    score = rewards.resolve("retool")(replace(wrong, user_turns=turns))
    assert isinstance(score, Score)
    metrics = {metric.name: metric.value for metric in score.metrics}
    assert metrics == {"reward/accuracy": 0.0, "reward/wrong_with_many_turns": stalling}


@pytest.mark.asyncio
async def test_geometry_is_compared_as_mathematics_in_a_process_of_its_own() -> None:
    fields = {"reward_model": {"ground_truth": r"2\sqrt{3}"}}
    answer = Message(role="assistant", content=r"\boxed{\sqrt{12}}", reasoning="by Pythagoras")
    trajectory = make_trajectory(fields=fields)
    reward = rewards.resolve("geometry3k")
    scored = reward(replace(trajectory, messages=(trajectory.messages[0], answer)))
    assert isinstance(scored, Awaitable)
    score = await scored
    assert isinstance(score, Score)
    assert score.value == pytest.approx(1.0)
    assert score.answer == r"\sqrt{12}"
    assert dict(m[:2] for m in score.metrics) == {
        "reward/accuracy": 1.0,
        "reward/format": 1.0,
        "reward/timeouts": 0,
    }


def test_a_process_loads_the_library_before_its_first_time_limit() -> None:
    program = (
        "import sys; from treadle.tools.rewards import lookup; lookup.resolve('geometry3k'); "
        "assert 'math_verify' not in sys.modules; lookup._prepared('geometry3k', None); "
        "loaded = set(sys.modules); from treadle.tools.rewards.geometry3k import same; "
        r"assert same(r'\sqrt{12}', r'2\sqrt{3}') and not same('3', r'2\sqrt{3}'); "
        "assert set(sys.modules) == loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
