from treadle.trainer.report.pace import Expected, Pace, expect

NAN = float("nan")


def taken(*seconds: float) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"time/step_s": s}) for step, s in enumerate(seconds, start=1)]


def test_nothing_is_expected_before_a_step() -> None:
    assert expect([], total_steps=3) is None
    assert expect([(0, {"time/validate_s": 9.0})], total_steps=3) is None
    assert expect([(1, {"time/step_s": NAN})], total_steps=3) is None


def test_the_first_step_counts_only_while_it_is_alone() -> None:
    assert expect(taken(60.0), total_steps=4) == Expected(step_s=60.0, left_s=180.0)
    assert expect(taken(60.0, 10.0), total_steps=4) == Expected(step_s=10.0, left_s=20.0)


def test_one_slow_step_changes_nothing() -> None:
    assert expect(taken(60, 10, 11, 900, 10, 12), total_steps=16) == Expected(
        step_s=11.0, left_s=110.0
    )


def test_the_steps_of_long_ago_do_not_count() -> None:
    found = expect(taken(*[1.0] * 500, *[3.0] * 100), total_steps=601)
    assert found == Expected(step_s=3.0, left_s=3.0)


def test_validations_and_checkpoints_to_come_are_counted_apart() -> None:
    records = taken(50.0, 10.0, 10.0)
    records += [(4, {"time/step_s": 35.0, "time/validate_s": 20.0, "time/save_s": 5.0})]
    records = [(0, {"time/validate_s": 30.0}), *records]
    # Steps 5 to 10; validation after 8 and 10, checkpoints after 6, 8 and 10.
    found = expect(records, total_steps=10, val_every=4, save_every=2)
    assert found == Expected(step_s=10.0, left_s=60.0 + 2 * 25.0 + 3 * 5.0)
    # A checkpoint after the last step; no validation, whatever the first one took.
    found = expect(records, total_steps=10)
    assert found == Expected(step_s=10.0, left_s=60.0 + 5.0)
    # Of a kind that has not been yet nothing is known.
    found = expect(taken(50.0, 10.0), total_steps=10, val_every=4, save_every=2)
    assert found == Expected(step_s=10.0, left_s=80.0)


def test_a_resumed_run_goes_by_its_own_steps() -> None:
    pace = Pace(total_steps=12)
    pace.step_done(10, {"time/step_s": 40.0})
    assert pace.step_done(11, {"time/step_s": 4.0}) == Expected(step_s=4.0, left_s=4.0)
    last = pace.step_done(12, {"time/step_s": 6.0, "reward/mean": 1.0})
    assert last == Expected(step_s=5.0, left_s=0.0)
