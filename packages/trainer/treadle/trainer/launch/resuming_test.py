from collections.abc import Sequence
from pathlib import Path

import pytest

from treadle.policy.client.group import PolicyError
from treadle.trainer.launch.process import LostProcessError
from treadle.trainer.launch.resuming import loss_notes, run_resuming

_LOST = PolicyError("policy rank 1 was ended by SIGKILL", lost=True)


def _attempts(
    run_dir: Path, *ends: tuple[int, PolicyError | LostProcessError]
) -> list[Sequence[str]]:
    """Runs attempts that reach a checkpoint and then fail; returns what each was told of losses."""
    told: list[Sequence[str]] = []
    remaining = list(ends)

    def attempt(losses: Sequence[str]) -> list[Sequence[str]]:
        told.append(losses)
        if not remaining:
            return told
        step, error = remaining.pop(0)
        (run_dir / "checkpoints" / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        raise error

    return run_resuming(attempt, run_dir=run_dir, max_failures=2)


def test_a_checkpoint_in_between_begins_the_count_anew(tmp_path: Path) -> None:
    told = _attempts(tmp_path, (2, _LOST), (2, _LOST), (4, _LOST), (4, _LOST))
    assert [len(losses) for losses in told] == [0, 1, 2, 3, 4]
    assert told[-1][0] == "policy rank 1 was ended by SIGKILL"


def test_a_node_that_dies_while_the_run_starts_counts_as_well(tmp_path: Path) -> None:
    told = _attempts(tmp_path, (2, LostProcessError("rollout-0: its Ray actor is gone")))
    assert told[-1] == ("rollout-0: its Ray actor is gone",)


def test_a_run_that_gets_nowhere_ends(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as raised:
        _attempts(tmp_path, (2, _LOST), (2, _LOST), (2, _LOST))
    assert "resumed 2 times without a new checkpoint" in raised.value.__notes__[0]


@pytest.mark.parametrize("from_input", [True, False])
def test_what_a_rank_raised_itself_is_not_tried_again(tmp_path: Path, from_input: bool) -> None:
    raised = PolicyError("the model cannot be split", from_input=from_input)
    with pytest.raises(PolicyError, match="cannot be split"):
        _attempts(tmp_path, (2, raised))


def test_losses_before_the_first_checkpoint_are_all_told() -> None:
    assert len(loss_notes(["one", "two"], after=-1)) == 2
    assert loss_notes(["one", "two"], after=4) == ["the run resumed by itself, after two"]
    assert not loss_notes([], after=None)
