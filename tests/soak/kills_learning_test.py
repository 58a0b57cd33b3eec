"""A sample of the campaign of kills: some in a run of each schedule."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
from soak.faults import SCHEDULES
from soak.main import main

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(autouse=True)
def _adopts_until_the_end() -> Iterator[None]:
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


def test_runs_of_each_schedule_hold_when_their_processes_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In four rounds each kind of process is killed; a round is two kills or three.
    few = ("--kills", "7", "--faults", "2", "--steps", "4", "--seed", "4")
    status = main([*few, "--directory", str(tmp_path / "kills")])
    said = capsys.readouterr().out
    assert status == 0, said
    assert all(f"killed with {schedule}" in said for schedule in SCHEDULES), said
