"""The causes of a rank add up to its time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.policy.config.choices import CAUSES, RankCause
from treadle.policy.rank_time import RankTime


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_counts_for_the_innermost_cause() -> None:
    watch = Watch()
    spent = RankTime(watch)
    watch.now += 1
    with spent.spent_on("train"):
        watch.now += 2
        with spent.spent_on("optimizer"):
            watch.now += 4
            with spent.spent_on("memory"):
                watch.now += 8
        watch.now += 16
    taken = spent.take()
    assert {cause: s for cause, s in taken.items() if s} == {
        "waiting": 1.0,
        "train": 18.0,
        "optimizer": 4.0,
        "memory": 8.0,
    }
    assert set(spent.take().values()) == {0.0}


def test_a_cause_ends_with_its_error() -> None:
    watch = Watch()
    spent = RankTime(watch)
    with pytest.raises(OSError, match="full"), spent.spent_on("save"):
        watch.now += 1
        raise OSError("full")
    watch.now += 2
    assert (spent.take()["save"], spent.take()["waiting"]) == (1.0, 0.0)


_Tree: st.SearchStrategy[list[tuple[RankCause, list[object]]]] = st.deferred(
    lambda: st.lists(st.tuples(st.sampled_from(CAUSES), _Tree), max_size=3)
)


@settings(deadline=None)
@given(tree=_Tree)
def test_the_causes_add_up(tree: list[tuple[RankCause, list[object]]]) -> None:
    watch = Watch()
    spent = RankTime(watch)

    def run(level: object) -> None:
        assert isinstance(level, list)
        for cause, inner in level:
            watch.now += 0.5
            with spent.spent_on(cause):
                watch.now += 0.25
                run(inner)

    run(tree)
    assert sum(spent.take().values()) == pytest.approx(watch.now - 100.0)
