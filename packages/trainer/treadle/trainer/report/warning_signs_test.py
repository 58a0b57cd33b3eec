import math

from treadle.trainer.report.metrics import Record
from treadle.trainer.report.warning_signs import Watch, run_signs


def step(number: int, **values: float) -> Record:
    names = {
        "signal": "groups/with_signal",
        "trained": "tokens/trained",
        "norm": "actor/grad_norm",
        "failed": "rollout/num_failed",
        "total": "rollout/num_trajectories",
        "low": "reward/min",
        "high": "reward/max",
        "mean": "reward/mean",
        "unknown": "tool/unknown",
    }
    given = {"signal": 0.5, "trained": 100.0, "norm": 1.0, "failed": 0.0, "total": 8.0, **values}
    return {"step": number, **{names[name]: value for name, value in given.items()}}


def test_a_healthy_step_is_not_remarked_on() -> None:
    watch = Watch()
    assert [watch.step(step(number)) for number in range(1, 20)] == [[]] * 19


def test_a_step_without_signal_says_what_the_rewards_were() -> None:
    flat = {"signal": 0.0, "low": 0.0, "high": 0.0, "mean": 0.0}
    assert Watch().step(step(1, trained=0.0, **flat)) == [
        "nothing was trained: every reward is 0, so every advantage is 0"
    ]
    assert Watch().step(step(1, signal=0.0, low=0.0, high=1.0)) == [
        "no group has differing rewards, so every advantage is 0 and the reward moves no weight"
    ]


def test_a_lasting_sign_is_told_again_ever_less_often() -> None:
    watch = Watch()
    told = [number for number in range(1, 102) if watch.step(step(number, signal=0.0))]
    assert told == [1, 10, 100]
    watch.step(step(102))
    (again,) = watch.step(step(103, signal=0.0))
    assert "in a row" not in again


def test_most_trajectories_failed() -> None:
    assert Watch().step(step(1, failed=4.0)) == []
    assert Watch().step(step(1, failed=5.0)) == ["most trajectories failed: 5 of 8"]


def test_an_exploding_gradient_is_measured_against_the_steps_before() -> None:
    watch = Watch()
    for number in range(1, 5):
        watch.step(step(number, norm=1.0))
    assert watch.step(step(5, norm=100.0)) == []  # too few steps to tell
    (sign,) = watch.step(step(6, norm=11.0))
    assert sign.startswith("the gradient exploded: its norm is 11, and the median of the 5 steps")
    (sign,) = watch.step(step(7, norm=math.inf))
    assert sign == "the gradient is not finite: lower policy.optimizer.lr"
    assert watch.step(step(8, norm=9.0)) == []


def test_steps_without_a_gradient_do_not_lower_the_median() -> None:
    watch = Watch()
    for number in range(1, 30):
        watch.step(step(number, norm=0.0, signal=0.0))
    assert watch.step(step(30, norm=1.0)) == []


def test_a_run_is_summed_up() -> None:
    records = [
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
