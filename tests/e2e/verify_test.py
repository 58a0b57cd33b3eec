"""`treadle verify`: a run passes as it is, and no alteration of it does."""

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing.trajectories import is_as_written
from treadle.trainer.main import main
from treadle.trainer.report.seals import SEALS, read_seals
from treadle.trainer.verify.quick import train_file
from treadle.trainer.verify.recorded import RecordError, read_step

from .alterations import ROWS, make_run, problems_of, reseal, rewrite, vouched_files

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that learns."""
    return make_run(tmp_path_factory.mktemp("run"), "async", "policy.backend=fake")


def test_a_run_passes_and_is_computed_again_bit_for_bit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run), "--replay"]) == 0
    said = capsys.readouterr().out
    assert "2 steps were computed again, and are what the run recorded, bit for bit" in said
    assert main(["verify", str(run), "--replay", "--after=1"]) == 0
    assert "1 steps were computed again" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["overlap", "stream"])
def test_a_run_of_another_schedule_is_computed_again(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(make_run(tmp_path, kind, "policy.backend=fake")), "--replay"]) == 0
    assert "2 steps were computed again, and are what" in capsys.readouterr().out


def test_every_altered_byte_is_found(run: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    files = vouched_files(copy)
    assert len(files) > 8
    for file in files:
        content = file.read_bytes()
        for _ in range(4):
            place, flip = draw.randrange(len(content)), draw.randrange(1, 256)
            altered = bytearray(content)
            altered[place] ^= flip
            file.write_bytes(altered)
            assert problems_of(copy), f"byte {place} of {file} by {flip:#x}"
        file.write_bytes(content)
    assert problems_of(copy) == []


_BY_REPLAY = (
    "id",
    "id of a prompt",
    "log-probability of the engine",
    "log-probability of the policy",
    "entropy",
)


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind not in _BY_REPLAY])
def test_a_value_that_contradicts_others_is_found_without_its_seal(
    kind: str, run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for number in range(4):
        step = 1 + number % 2
        rewrite(copy, step, lambda rows, n=number: ROWS[kind](rows, random.Random(n)))  # type: ignore[misc]
        reseal(copy)
        assert problems_of(copy)
        shutil.copy(run / train_file(step), copy / train_file(step))
        shutil.copy(run / SEALS, copy / SEALS)
    assert problems_of(copy) == []


def test_a_time_share_that_was_altered_is_found_without_its_seal(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    path = copy / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["policy/time_share/train"] += 0.01
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reseal(copy)
    assert any("policy/time_share/*" in problem for problem in problems_of(copy))


@pytest.mark.parametrize("kind", ["id", "log-probability of the engine"])
def test_what_only_the_policy_can_judge_is_found_by_the_replay(
    kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)

    def change(rows: list[dict[str, Any]]) -> None:
        ROWS[kind]([row for row in rows if row["advantage"]], random.Random(1))

    rewrite(copy, 2, change)
    reseal(copy)
    assert problems_of(copy) == []
    assert main(["verify", str(copy), "--replay"]) == 1
    assert "\nstep 2: " in capsys.readouterr().out


def test_a_damaged_footer_of_a_trajectory_file_is_a_problem_and_no_traceback(
    run: Path, tmp_path: Path
) -> None:
    content = (run / train_file(1)).read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    path, draw = tmp_path / "damaged.parquet", random.Random(0)
    for place in draw.sample(range(len(content) - 8 - footer, len(content)), 100):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            read_step(path)
        except RecordError:
            continue
        assert not is_as_written(path), place


def test_the_seal_of_a_line_is_that_of_its_bytes(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    sealed = [digest for _, name, digest in read_seals(run) if name == "metrics.jsonl"]
    assert sealed == [hashlib.sha256(line).hexdigest() for line in lines]
