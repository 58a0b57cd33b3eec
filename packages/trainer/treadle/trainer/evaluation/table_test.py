from treadle.trainer.evaluation.scores import Estimate, Lengths, Scores
from treadle.trainer.evaluation.table import table
from treadle.trainer.report.at_k import Interval

ONE = Scores(
    data_source="math",
    rows=3,
    samples=6,
    failed=1,
    reward=Estimate(mean=0.5, standard_error=0.25),
    accuracy=Estimate(mean=0.5, standard_error=0.25),
    pass_at={1: 0.5, 2: 2 / 3},
    at_k={
        "reward/mean@2": Interval(mean=0.5, low=0.25, high=0.75),
        "accuracy/mean@2": Interval(mean=0.5, low=0.25, high=0.75),
        "accuracy/maj@2": Interval(mean=0.625, low=0.5, high=0.75),
    },
    tool_call_rate=0.5,
    turns=2.25,
    response_tokens=Lengths(mean=20.4, median=20, max=33),
    stops={"finished": 0.8, "response_length": 0.2},
)
ALL_FAILED = Scores(
    data_source="code",
    rows=1,
    samples=2,
    failed=2,
    reward=Estimate(mean=-1, standard_error=None),
    accuracy=None,
    pass_at={},
    at_k={"reward/mean@2": Interval(mean=-1, low=None, high=None)},
    tool_call_rate=0,
    turns=None,
    response_tokens=None,
    stops={},
)


def _of_all(one: Scores) -> Scores:
    from dataclasses import replace

    return replace(one, data_source="all")


def test_one_data_source_is_shown_once() -> None:
    assert table([ONE, _of_all(ONE)]).splitlines()[:8] == [
        "data source  rows  samples           reward       accuracy  pass@1  pass@2",
        "math            3        6  0.5000 ± 0.2500  50.0% ± 25.0%   50.0%   66.7%",
        "",
        "data source       accuracy mean@2        accuracy maj@2",
        "math         0.500 [0.250, 0.750]  0.625 [0.500, 0.750]",
        "",
        "data source  failed  called a tool  turns  tokens  longest  finished  response_length",
        "math              1          50.0%    2.2    20.4       33     80.0%            20.0%",
    ]


def test_several_have_a_line_each_and_what_is_not_known_is_a_dash() -> None:
    lines = table([ONE, ALL_FAILED, _of_all(ONE)]).splitlines()
    assert lines[2].split() == ["code", "1", "2", "-1", "-", "-", "-"]
    assert lines[7].split() == ["code", "-", "-"]
    assert lines[12].split() == ["code", "2", "0.0%", "-", "-", "-", "-", "-"]
    assert lines[3].startswith("all ")
    assert len({len(line) for line in lines[:4]}) == 1


def test_a_reward_that_does_not_tell_right_from_wrong_is_explained() -> None:
    text = table([ALL_FAILED, _of_all(ALL_FAILED)])
    assert "pass@1" not in text.splitlines()[0]
    assert text.splitlines()[3].split() == ["data", "source", "reward", "mean@2"]
    assert "the reward does not tell right from wrong" in text
