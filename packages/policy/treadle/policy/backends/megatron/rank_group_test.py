import pytest

from treadle.policy.testing.ranks import RankTask, run_ranks


def test_a_rank_group_reports_the_failing_rank() -> None:
    with pytest.raises(AssertionError, match="rank 0 ended with 1"):
        run_ranks(f"{__name__}:fail", 1, None)


def fail(task: RankTask) -> None:
    raise ValueError(f"no such thing in {task}")
