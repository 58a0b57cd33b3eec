import pytest

from treadle.tools.rewards import retool


@pytest.mark.parametrize(
    ("mode", "rewards"),
    [
        ("shaped", [-1.0, -0.9, -0.5, 0.0, 0.0]),
        ("flat", [-1.0, -1.0, -1.0, -1.0, -1.0]),
        ("capped", [-1.0, -0.9, -0.5, -0.5, -0.5]),
    ],
)
def test_what_a_wrong_answer_gives_after_so_many_turns(
    mode: retool.Mode, rewards: list[float]
) -> None:
    turns = [2, 4, 12, 22, 40]
    scores = [retool.score(r"\boxed{41}", "42", num_turns=n, mode=mode) for n in turns]
    assert scores == pytest.approx(rewards)


@pytest.mark.parametrize("mode", retool.MODES)
def test_a_right_answer_is_worth_the_same_in_every_mode(mode: retool.Mode) -> None:
    assert retool.score(r"It is \boxed{42}.", "42", num_turns=16, mode=mode) == 1.0
    assert retool.score(r"It is \boxed{025}.", "25", num_turns=16, mode=mode) == 1.0
