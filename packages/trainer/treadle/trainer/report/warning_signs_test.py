"""When each alert fires and when it does not."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.trainer.report.alert_rules import RULES
from treadle.trainer.report.metrics import Record
from treadle.trainer.report.warning_signs import Watch, run_signs

HEALTHY: dict[str, float] = {
    "groups/with_signal": 0.5,
    "groups/trained": 16.0,
    "tokens/trained": 100.0,
    "actor/grad_norm": 1.0,
    "actor/entropy": 0.3,
    "rollout/num_failed": 0.0,
    "rollout/num_trajectories": 8.0,
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "drift/turns": 500.0,
    "drift/sampled": 0.0,
    "drift/observed": 0.0,
    "rollout/logprob_diff_mean": 0.01,
    "agent_loop/generate_s": 2.0,
    "agent_loop/tool_calls_s": 0.5,
    "agent_loop/slowest/generate_s": 4.0,
    "agent_loop/slowest/tool_calls_s": 0.5,
    "time/rollout_s": 5.0,
    "time/step_s": 8.0,
}
_SHORT = {
    "signal": "groups/with_signal",
    "trained": "tokens/trained",
    "norm": "actor/grad_norm",
    "entropy": "actor/entropy",
    "failed": "rollout/num_failed",
    "low": "reward/min",
    "high": "reward/max",
    "mean": "reward/mean",
    "unknown": "tool/unknown",
    "turns": "drift/turns",
    "drifted": "drift/sampled",
    "apart": "rollout/logprob_diff_mean",
    "fresh_apart": "rollout/logprob_diff_fresh_mean",
    "generate": "agent_loop/generate_s",
    "tools": "agent_loop/tool_calls_s",
    "slowest": "agent_loop/slowest/generate_s",
    "rollout": "time/rollout_s",
    "step_s": "time/step_s",
    "release": "time/release_s",
}


def step(number: int, **values: float) -> Record:
    return {"step": number, **HEALTHY, **{_SHORT[name]: value for name, value in values.items()}}


def told(*steps: dict[str, float]) -> list[tuple[int, str]]:
    """Returns the step and the name of each alert of a run."""
    watch = Watch()
    return [
        (number, alert.name)
        for number, values in enumerate(steps, start=1)
        for alert in watch.step(step(number, **values))
    ]


def texts(watch: Watch, record: Record) -> list[str]:
    return [alert.text for alert in watch.step(record)]


def test_a_healthy_step_is_not_remarked_on() -> None:
    assert told(*[{}] * 19) == []


def test_a_step_without_signal_says_what_the_rewards_were() -> None:
    flat = {"signal": 0.0, "low": 0.0, "high": 0.0, "mean": 0.0}
    assert texts(Watch(), step(1, trained=0.0, **flat)) == [
        "nothing was trained: every reward is 0, so every advantage is 0"
    ]
    assert texts(Watch(), step(1, signal=0.0, low=0.0, high=1.0)) == [
        "no group has differing rewards, so every advantage is 0 and the reward moves no weight"
    ]


def test_a_lasting_alert_is_told_again_ever_less_often() -> None:
    watch = Watch()
    told_in = [number for number in range(1, 102) if watch.step(step(number, signal=0.0))]
    assert told_in == [1, 10, 100]
    assert watch.active == {"no_signal"}
    watch.step(step(102))
    assert watch.active == frozenset()
    (again,) = watch.step(step(103, signal=0.0))
    assert "in a row" not in again.text


def test_idle_servers_are_told_of_once_for_each_cause() -> None:
    tail = {"generate": 0.5, "tools": 0.1, "slowest": 4.5}
    tools = {"generate": 0.5, "tools": 4.0}
    steps = [tail] * 30 + [{}] * 5 + [tail] * 6 + [tools] * 6 + [tail] * 6 + [tools] * 6
    assert [number for number, name in told(*steps) if name == "idle"] == [5, 43]
    # A resumed run has told what it did before.
    watch = Watch([step(number, **tail) for number in range(1, 7)])
    assert watch.step(step(7, **tail)) == []
    assert watch.active == {"idle"}


def test_a_resumed_run_goes_on_counting() -> None:
    before = [step(number, signal=0.0) for number in range(10)]
    watch = Watch(before)
    (alert,) = watch.step(step(10, signal=0.0))
    assert alert.text.endswith("(for 10 steps in a row)")


def test_most_trajectories_failed() -> None:
    assert told({"failed": 4.0}) == []
    assert texts(Watch(), step(1, failed=5.0)) == ["most trajectories failed: 5 of 8"]


def test_an_exploding_gradient_is_measured_against_the_steps_before() -> None:
    watch = Watch()
    for number in range(1, 5):
        watch.step(step(number, norm=1.0))
    assert watch.step(step(5, norm=100.0)) == []  # too few steps to tell
    (sign,) = texts(watch, step(6, norm=11.0))
    assert sign.startswith("the gradient exploded: its norm is 11, and the median of the 5 steps")
    (sign,) = texts(watch, step(7, norm=math.inf))
    assert sign == "the gradient is not finite: lower policy.optimizer.lr"
    assert watch.step(step(8, norm=9.0)) == []


def test_steps_without_a_gradient_do_not_lower_the_median() -> None:
    watch = Watch()
    for number in range(1, 30):
        watch.step(step(number, norm=0.0, signal=0.0))
    assert watch.step(step(30, norm=1.0)) == []


_COLLAPSE = [{"mean": 0.5}] * 5 + [{"mean": 0.0}] * 5


@pytest.mark.parametrize(
    ("name", "steps", "first"),
    [
        ("reward_collapsed", _COLLAPSE, 9),
        # In the first steps of a run, as the demo with ten times its learning rate.
        ("reward_collapsed", [{"mean": r} for r in (0.48, 0.27, 0.0, 0.0, 0.0, 0.0, 0.0)], 7),
        # Rewards from -1 to 1.
        (
            "reward_collapsed",
            [{"low": -1.0, "mean": 0.6}] * 5 + [{"low": -1.0, "mean": -0.9}] * 5,
            8,
        ),
        ("entropy_collapsed", [{"entropy": 0.3}] * 5 + [{"entropy": 0.02}] * 5, 10),
        ("drift", [{}] * 3 + [{"drifted": 30.0}], 4),
        ("drift", [{"drifted": 6.0}], 1),
        ("mismatch", [{"apart": 0.11}], 1),
        ("mismatch", [{"apart": 0.01, "fresh_apart": 0.11}], 1),
        ("little_signal", [{"signal": 0.06}] * 5, 5),
        ("idle", [{"generate": 0.5, "tools": 0.1, "slowest": 4.5}] * 5, 5),
        ("idle", [{"generate": 0.5, "tools": 4.0}] * 5, 5),
        ("idle", [{"rollout": 1.0}] * 5, 5),
    ],
)
def test_it_fires(name: str, steps: list[dict[str, float]], first: int) -> None:
    assert [number for number, each in told(*steps) if each == name] == [first]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        # Rare successes come and go by chance.
        ("reward_collapsed", [{"mean": 0.05}] * 5 + [{"mean": 0.0}] * 5),
        # It fell, and the better part is left.
        ("reward_collapsed", [{"mean": 0.9}] * 5 + [{"mean": 0.5}] * 5),
        ("reward_collapsed", [{"mean": 0.5}] * 5 + [{"mean": 0.0}] * 2 + [{"mean": 0.5}] * 5),
        # The rows are solved.
        ("entropy_collapsed", [{"entropy": 0.3}] * 5 + [{"entropy": 0.01, "mean": 0.97}] * 5),
        # The default run: a fifth is left at its end.
        ("entropy_collapsed", [{"entropy": 0.042}] * 5 + [{"entropy": 0.008}] * 9),
        ("drift", [{"drifted": 1.0}] * 9),
        ("mismatch", [{"apart": 0.05}] * 9),
        # Tokens of older weights are apart, as they must be.
        ("mismatch", [{"apart": 0.3, "fresh_apart": 0.01}] * 9),
        ("little_signal", [{"signal": 0.25}, {"signal": 0.125}] * 5),
        ("idle", [{"rollout": 1.0, "release": 0.5}] * 5),
        ("idle", [{"generate": 0.5, "tools": 4.0, "rollout": 3.0}] * 5),
        # Many rounds: the slowest is far from the mean, and the rollout far longer.
        ("idle", [{"generate": 0.5, "tools": 0.1, "slowest": 4.5, "rollout": 100.0}] * 5),
    ],
)
def test_it_does_not_fire(name: str, steps: list[dict[str, float]]) -> None:
    assert name not in {each for _, each in told(*steps)}


def test_solved_rows_are_told_apart_from_hard_ones() -> None:
    def last(**values: float) -> str:
        watch = Watch()
        return [texts(watch, step(n, signal=0.05, **values)) for n in range(1, 6)][-1][0]

    assert "the rows are solved" in last(mean=0.98)
    assert "raise rollout.samples_per_prompt" in last(mean=0.02)


def test_a_rule_reads_what_it_says() -> None:
    class Recorded(dict[str, float]):
        def __init__(self) -> None:
            super().__init__(step(1))
            self.read: set[str] = set()

        def __getitem__(self, name: str) -> float:
            self.read.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: float | None = None) -> float | None:  # type: ignore[override]
            self.read.add(name)
            return super().get(name, default)

        def __contains__(self, name: object) -> bool:
            self.read.add(str(name))
            return super().__contains__(name)

    for rule in RULES:
        record = Recorded()
        rule.check([record] * 12)
        assert record.read <= set(rule.reads), rule.name


@settings(max_examples=50)
@given(
    values=st.fixed_dictionaries(
        {
            "signal": st.floats(0.15, 1.0),
            "mean": st.floats(0.0, 1.0),
            "norm": st.floats(1e-3, 1e3),
            "entropy": st.floats(1e-4, 5.0),
            "drifted": st.floats(0.0, 5.0),
            "apart": st.floats(0.0, 0.09),
            "generate": st.floats(1.0, 100.0),
            "step_s": st.floats(5.0, 24.0),
        }
    ),
    missing=st.sets(st.sampled_from(sorted(HEALTHY))),
    steps=st.integers(1, 30),
)
def test_constant_healthy_metrics_raise_no_alert(
    values: dict[str, float], missing: set[str], steps: int
) -> None:
    record = {name: value for name, value in step(1, **values).items() if name not in missing}
    record["agent_loop/slowest/generate_s"] = 2 * record.get("agent_loop/generate_s", 0.0)
    watch = Watch()
    assert [watch.step(record) for _ in range(steps)] == [[]] * steps


@given(
    st.lists(
        st.dictionaries(st.sampled_from(sorted(HEALTHY)), st.floats()), min_size=1, max_size=12
    )
)
@settings(max_examples=50)
def test_whatever_a_run_logged_can_be_judged(records: list[dict[str, float]]) -> None:
    watch = Watch()
    for record in records:
        watch.step(record)
    run_signs([{"step": float(number), **each} for number, each in enumerate(records)])


def test_a_run_is_summed_up() -> None:
    records: list[Record] = [
        {"step": 0, "val/num_failed": 2.0},
        step(1, signal=0.0, trained=0.0, unknown=3.0),
        step(2, signal=0.0, failed=6.0),
        step(3),
    ]
    assert run_signs(records) == (
        "nothing was trained in 1 of 3 steps",
        "no group had differing rewards in 2 of 3 steps",
        "6 of 24 trajectories failed (25%)",
        "2 trajectories of validations failed",
        "the model called unknown tools 3 times",
    )
    assert run_signs([step(1), step(2)]) == ()


def test_the_summary_names_each_alert() -> None:
    records = [step(number, **values) for number, values in enumerate(_COLLAPSE, start=1)]
    assert "the reward had collapsed in 2 of 10 steps" in run_signs(records)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"tools": 0.62}, "for 62% of the step all of their trajectories were in tools"),
        ({"weights": 0.6}, "for 60% of the step they were stopped for new weights"),
        (
            {"training": 0.7, "prompts": 0.2},
            "for 70% of the step they had no trajectory while the policy trained",
        ),
        (
            {"training": 0.2, "prompts": 0.7},
            "for 70% of the step no prompt was there and the policy did not train",
        ),
        (
            {"training": 0.1, "prompts": 0.3, "tools": 0.2, "rollout": 0.8},
            "for 60% of the step they waited for the last trajectories of the batch, and the "
            "policy did for 80%",
        ),
        ({"training": 0.7, "tools": 0.2}, None),
    ],
)
def test_servers_that_tell_what_they_waited_for_have_it_said(
    shares: dict[str, float], said: str | None
) -> None:
    told = dict.fromkeys(("tools", "training", "prompts", "weights"), 0.0) | {
        cause: share for cause, share in shares.items() if cause != "rollout"
    }
    record = {
        **{f"servers/time_share/{cause}": share for cause, share in told.items()},
        "policy/time_share/rollout": shares.get("rollout", 0.0),
        # What the times alone would say counts no more.
        "agent_loop/generate_s": 0.5,
        "agent_loop/tool_calls_s": 4.0,
    }
    watch = Watch()
    alerts = [alert for n in range(1, 6) for alert in watch.step({**step(n), **record})]
    if said is None:
        assert alerts == []
    else:
        (alert,) = alerts
        assert alert.name == "idle"
        assert alert.text.startswith(f"servers idle: {said}")
