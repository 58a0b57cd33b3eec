import asyncio
import errno
import json
import zlib
from pathlib import Path

import pytest

from treadle.trainer.checkpoint.run_directory import (
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
    read_config,
)


async def _write_policy(directory: Path) -> None:
    await asyncio.to_thread((directory / "policy").mkdir)
    await asyncio.to_thread((directory / "policy" / "weights").write_text, directory.name)


def _save(checkpoints: Checkpoints, step: int) -> None:
    asyncio.run(checkpoints.save(step, {"reward/mean": float(step)}, _write_policy))


def test_the_newest_checkpoint_is_found_with_its_metrics(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    for step in (5, 10, 15):
        _save(checkpoints, step)
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.metrics) == (15, {"reward/mean": 15.0})
    assert (latest.policy_directory / "weights").exists()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step-00000010", "step-00000015"]


def test_a_run_that_was_set_back_keeps_what_it_saves(tmp_path: Path) -> None:
    for step in (5, 10):
        _save(Checkpoints(tmp_path, keep=2), step)
    (tmp_path / "latest").write_text("step-00000005\n")
    checkpoints = Checkpoints(tmp_path, keep=1)
    _save(checkpoints, 6)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 6
    assert (latest.policy_directory / "weights").exists()


def test_a_checkpoint_is_found_by_its_step(tmp_path: Path) -> None:
    async def with_hf(directory: Path) -> None:
        await _write_policy(directory)
        await asyncio.to_thread((directory / "hf").mkdir)

    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, 3)
    asyncio.run(checkpoints.save(7, {}, with_hf))
    assert checkpoints.steps() == (3, 7)
    assert checkpoints.at(3).hf_directory is None
    assert checkpoints.at(7).hf_directory == tmp_path / "step-00000007" / "hf"
    with pytest.raises(RunDirectoryError, match=r"no checkpoint of step 5; .*checkpoint: 3, 7$"):
        checkpoints.at(5)


def test_a_model_without_the_rest_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, 5)
    asyncio.run(checkpoints.write_model(10, _write_policy))
    assert checkpoints.steps() == (5,)
    again = Checkpoints(tmp_path, keep=2)  # of a trainer that resumes
    assert (found := again.latest()) is not None
    assert found.step == 5
    asyncio.run(again.write_model(6, _write_policy))
    asyncio.run(again.complete(6, {"reward/mean": 0.5}))
    assert again.steps() == (5, 6)
    assert again.last_good == tmp_path / "step-00000006"
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk_leaves_the_newest_checkpoint_as_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    _save(checkpoints, 5)

    async def disk_is_full(directory: Path) -> None:
        await asyncio.to_thread((directory / "policy").mkdir)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunDirectoryError, match=r"step 10 cannot be written .*No space left"):
        asyncio.run(checkpoints.save(10, {}, disk_is_full))
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 5
    assert not list(tmp_path.glob("*.partial"))


def test_what_a_killed_trainer_left_behind_is_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (tmp_path / "step-00000005.partial" / "policy").mkdir(parents=True)
    assert checkpoints.latest() is None
    _save(checkpoints, 5)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 5


def test_the_manifest_has_every_file_and_is_written_last(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    _save(checkpoints, 5)
    saved = tmp_path / "checkpoints" / "step-00000005"
    files = {
        path.relative_to(saved).as_posix(): path for path in saved.rglob("*") if path.is_file()
    }
    manifest = files.pop("manifest.json")
    entries = json.loads(manifest.read_text())["files"]
    assert entries == {
        name: {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}
        for name, path in files.items()
    }
    assert set(entries) == {"config.json", "policy/weights", "state.json"}
    assert all(path.stat().st_mtime_ns <= manifest.stat().st_mtime_ns for path in files.values())
    assert checkpoints.last_good == saved


def test_the_pointer_is_a_hint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (5, 10, 15):
        _save(checkpoints, step)
    (tmp_path / "latest").write_text("step-00000005\n")  # the run is set back
    again = Checkpoints(tmp_path, keep=3)
    assert again.newest_whole().notes == ()
    assert again.last_good == tmp_path / "step-00000005"
    (tmp_path / "step-00000005" / "policy" / "weights").write_text("other")
    (tmp_path / "step-00000015" / "state.json").write_text("{}")
    found = again.newest_whole()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 10
    assert [note.partition(" cannot be used")[0][-13:] for note in found.notes] == [
        "step-00000005",
        "step-00000015",
    ]
    with pytest.raises(RunDirectoryError, match=r"policy/weights has .* The newest whole one is "):
        again.latest()


def test_one_trainer_at_a_time(tmp_path: Path) -> None:
    with (
        RunDirectory(tmp_path / "run"),
        pytest.raises(RunDirectoryError, match=r"in use by another trainer \(pid \d+\)"),
    ):
        RunDirectory(tmp_path / "run").__enter__()
    with RunDirectory(tmp_path / "run") as again:
        assert not again.holds_run
        again.write_config({"run": {"seed": 1}})
        assert not again.holds_run
        (again.path / "metrics.jsonl").write_text('{"step": 0}\n')
        assert again.holds_run
        assert read_config(again.path / "config.json") == {"run": {"seed": 1}}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"run\.dir=.*file/run"):
        RunDirectory(tmp_path / "file" / "run").__enter__()
