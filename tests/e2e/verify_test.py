"""`treadle verify`: a run passes as it is, and no alteration of it does."""

import hashlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treadle.trainer.checkpoint.run_directory import CONFIG
from treadle.trainer.config.load import load_config
from treadle.trainer.main import main
from treadle.trainer.report.seals import SEALS, read_seals, seal, sha256_of
from treadle.trainer.verify.quick import quick_problems, train_file

from .testing import SMALL, Trainer

pytestmark = pytest.mark.timeout(300)


_REWARD = """
import zlib


def score(data_source: str, solution_str: str, ground_truth: str) -> float:
    return float(zlib.crc32(solution_str.encode()) % 2)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that learns."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "reward.py").write_text(_REWARD)
    settings = (
        *SMALL,
        *("rollout.name=fake", "policy.backend=fake", f"reward.name={folder}/reward.py:score"),
        *("schedule.kind=async", "schedule.max_staleness=1", "algorithm.correction.weights=token"),
        *("schedule.save_every=1", "schedule.val_every=null", "schedule.val_before_train=false"),
    )
    trainer = Trainer(folder / "run", settings)
    assert trainer.wait() == 0, trainer.output
    return trainer.run_dir


def _problems(run_dir: Path) -> list[str]:
    return list(quick_problems(run_dir, load_config([run_dir / CONFIG], []).config))


def _reseal(run_dir: Path, step: int) -> None:
    """What somebody does who changes a file and knows of its seal."""
    kept = [each for each in read_seals(run_dir) if each[1] != train_file(step)]
    (run_dir / SEALS).unlink()
    for number, name, digest in kept:
        seal(run_dir, number, name, digest)
    seal(run_dir, step, train_file(step), sha256_of(run_dir / train_file(step)))


def _rewrite(run_dir: Path, step: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = run_dir / train_file(step)
    table = pq.read_table(path)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    _reseal(run_dir, step)


def test_a_run_passes_and_is_computed_again_bit_for_bit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(run), "--replay"]) == 0
    said = capsys.readouterr().out
    assert "2 steps were computed again, and are what the run recorded, bit for bit" in said
    assert main(["verify", str(run), "--replay", "--after=1"]) == 0
    assert "1 steps were computed again" in capsys.readouterr().out


def test_every_altered_byte_is_found(run: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    files = [*copy.rglob("*.parquet"), *(copy / "checkpoints").rglob("*/*")]
    files = [file for file in files if file.is_file()] + [copy / "metrics.jsonl", copy / SEALS]
    assert len(files) > 8
    for file in files:
        content = file.read_bytes()
        for _ in range(4):
            place, flip = draw.randrange(len(content)), draw.randrange(1, 256)
            altered = bytearray(content)
            altered[place] ^= flip
            file.write_bytes(altered)
            assert _problems(copy), f"byte {place} of {file} by {flip:#x}"
        file.write_bytes(content)
    assert _problems(copy) == []


def _sample(rows: list[dict[str, Any]], draw: random.Random) -> tuple[dict[str, Any], int]:
    """Returns a sample and the place of a token that the model sampled."""
    sample = draw.choice(draw.choice(rows)["samples"])
    sampled = [span for span in sample["spans"] if span["origin"] == "sampled"]
    span = draw.choice(sampled)
    return sample, draw.randrange(span["start"], span["stop"])


def _reward(rows: list[dict[str, Any]], draw: random.Random) -> None:
    row = draw.choice(rows)
    row["reward"] = 1.0 - row["reward"]


def _advantage(rows: list[dict[str, Any]], draw: random.Random) -> None:
    sample, place = _sample(rows, draw)
    sample["advantages"][place] += 0.25


def _version(rows: list[dict[str, Any]], draw: random.Random) -> None:
    sample, _ = _sample(rows, draw)
    sample["spans"][-1]["weight_version"] = 7
    for span in sample["spans"]:
        if span["origin"] == "sampled":
            span["weight_version"] = 7


def _span(rows: list[dict[str, Any]], draw: random.Random) -> None:
    sample, _ = _sample(rows, draw)
    sample["spans"][0]["stop"] += 1


def _mask(rows: list[dict[str, Any]], draw: random.Random) -> None:
    sample, place = _sample(rows, draw)
    sample["logprobs"][place] = float("nan")


def _logprob(rows: list[dict[str, Any]], draw: random.Random) -> None:
    sample, place = _sample(rows, draw)
    sample["logprobs"][place] -= 0.5


def _missing(rows: list[dict[str, Any]], draw: random.Random) -> None:
    del rows[draw.randrange(len(rows))]


def _twice(rows: list[dict[str, Any]], draw: random.Random) -> None:
    first, second = draw.sample(range(len(rows)), 2)
    rows[first] = rows[second]


@pytest.mark.parametrize("alter", [_reward, _advantage, _version, _span, _mask, _missing, _twice])
def test_a_value_that_contradicts_others_is_found_without_its_seal(
    alter: Callable[[list[dict[str, Any]], random.Random], None], run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for number in range(4):
        _rewrite(copy, 1 + number % 2, lambda rows, n=number: alter(rows, random.Random(n)))  # type: ignore[misc]
        assert _problems(copy)
        shutil.copy(run / train_file(1 + number % 2), copy / train_file(1 + number % 2))
        shutil.copy(run / SEALS, copy / SEALS)
    assert _problems(copy) == []


def _id(rows: list[dict[str, Any]], draw: random.Random) -> None:
    sample, place = _sample(rows, draw)
    sample["ids"][place] = (sample["ids"][place] + 1) % 100


@pytest.mark.parametrize("alter", [_id, _logprob])
def test_what_only_the_policy_can_judge_is_found_by_the_replay(
    alter: Callable[[list[dict[str, Any]], random.Random], None],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)

    def change(rows: list[dict[str, Any]]) -> None:
        alter([row for row in rows if row["advantage"]], random.Random(1))

    _rewrite(copy, 2, change)
    assert _problems(copy) == []
    assert main(["verify", str(copy), "--replay"]) == 1
    assert "\nstep 2: " in capsys.readouterr().out


def test_the_seal_of_a_line_is_that_of_its_bytes(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    sealed = [digest for _, name, digest in read_seals(run) if name == "metrics.jsonl"]
    assert sealed == [hashlib.sha256(line).hexdigest() for line in lines]
