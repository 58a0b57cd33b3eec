import asyncio
import errno
import fcntl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from treadle.trainer.report import MetricsLog, Pace, live_report, read_status
from treadle.trainer.report.status import Status, write_status


def page(run_dir: Path) -> str:
    return (run_dir / "report.html").read_text(encoding="utf-8")


def test_the_report_is_there_from_the_start_and_follows_the_run(tmp_path: Path) -> None:
    async def run() -> None:
        with (tmp_path / "lock").open("w") as lock, MetricsLog(tmp_path / "metrics.jsonl") as log:
            fcntl.flock(lock, fcntl.LOCK_EX)
            async with live_report(tmp_path) as report:
                assert '"state":"running"' in page(tmp_path)
                assert '"num_steps":0' in page(tmp_path)
                log.append(1, {"val/reward": 0.5})
                report.update()
                report.update()
                assert report._writing is not None
                await report._writing
                assert '"num_steps":1' in page(tmp_path)
                assert '"state":"running"' in page(tmp_path)
                log.append(2, {})
        assert '"num_steps":2' in page(tmp_path)

    asyncio.run(run())
    assert '"state":"finished"' in page(tmp_path)
    assert (tmp_path / "curves.png").exists()


def test_another_run_of_the_process_opens_no_font_again(tmp_path: Path) -> None:
    async def run(run_dir: Path) -> None:
        with MetricsLog(run_dir / "metrics.jsonl") as log:
            async with live_report(run_dir):
                log.append(1, {"val/reward": 0.5})
                log.append(2, {"val/reward": 0.75})

    def fonts_after(run_dir: Path) -> int:
        run_dir.mkdir()
        asyncio.run(run(run_dir))
        assert (run_dir / "curves.png").exists()
        return sum(path.resolve().suffix == ".ttf" for path in Path("/proc/self/fd").iterdir())

    assert fonts_after(tmp_path / "a") == fonts_after(tmp_path / "b") > 0


def test_a_run_that_fails_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        async with live_report(tmp_path):
            raise RuntimeError("no server is left")

    with pytest.raises(RuntimeError):
        asyncio.run(run())
    assert "RuntimeError: no server is left" in page(tmp_path)


def test_a_run_that_is_interrupted_says_so(tmp_path: Path) -> None:
    async def run() -> None:
        begun = asyncio.Event()

        async def training() -> None:
            async with live_report(tmp_path) as report:
                report.update()
                begun.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(training())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert '"state":"interrupted"' in page(tmp_path)


def test_a_running_run_says_when_it_will_end(tmp_path: Path) -> None:
    async def run() -> None:
        with (tmp_path / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            async with live_report(tmp_path, pace=Pace(total_steps=5)) as report:
                assert read_status(tmp_path) == Status(state="running")
                report.step_done(0, {"time/validate_s": 7.0})
                assert read_status(tmp_path) == Status(state="running", step=0)
                report.step_done(1, {"time/step_s": 600.0}, busy={"rollout-0": 0.25})
                found = read_status(tmp_path)
                assert (found.step, found.step_s, found.busy) == (1, 600.0, {"rollout-0": 0.25})
                assert found.ends_at is not None
                left = datetime.fromisoformat(found.ends_at) - datetime.now(UTC)
                assert 2390 < left.total_seconds() <= 2400

    asyncio.run(run())
    assert read_status(tmp_path) == Status(state="finished")


def test_a_status_that_is_damaged_is_said_to_be(tmp_path: Path) -> None:
    for text in (
        '{"state": "running"}',
        '{"state": "finished", "error": null, "ends_at": "soon"}',
        '{"state": "finished", "error": null, "busy": {"rollout-0": "half"}}',
    ):
        (tmp_path / "status.json").write_text(text)
        with pytest.raises(ValueError, match=r"status\.json is damaged"):
            read_status(tmp_path)
    (tmp_path / "status.json").write_text('{"state": "finished", "error": null}')  # of release 0.1
    assert read_status(tmp_path) == Status(state="finished")


def test_a_report_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text("damaged\n")

    async def run() -> str:
        async with live_report(tmp_path):
            return "trained"

    assert asyncio.run(run()) == "trained"
    assert "metrics.jsonl, line 1 is damaged" in caplog.text


def test_a_run_that_ends_on_a_full_disk_says_so(tmp_path: Path) -> None:
    full = tmp_path / "status.json.partial"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):  # there is no file with room
        write_status(tmp_path, Status(state="running"))

    async def run(error: Exception | None) -> None:
        async with live_report(tmp_path, pace=Pace(total_steps=5), curves=False) as report:
            report.step_done(1, {"time/step_s": 600.0}, busy={"rollout-0": 0.25})
            full.symlink_to("/dev/full")
            if error is not None:
                raise error

    asyncio.run(run(None))
    assert read_status(tmp_path) == Status(state="finished")
    assert '"state":"finished"' in page(tmp_path)
    no_room = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(run(no_room))
    failed = Status(state="failed", error=f"OSError: {no_room}")
    assert read_status(tmp_path) == failed


def test_an_error_that_is_longer_than_the_room_on_a_full_disk_is_cut(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="failed", error="x" * 2000))
    had = (tmp_path / "status.json").stat()
    full = tmp_path / "status.json.partial"
    full.symlink_to("/dev/full")
    write_status(tmp_path, Status(state="failed", error="\u0416 " * 4096))
    error = read_status(tmp_path).error
    assert error is not None
    assert len(error) > 200
    assert error.endswith(" ...")
    assert error.removesuffix(" ...") in "\u0416 " * 4096
    assert (tmp_path / "status.json").stat().st_size <= max(had.st_size, 512 * had.st_blocks)
    assert not full.is_symlink()


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(tmp_path: Path) -> None:
    assert read_status(tmp_path).state == "unknown"
    write_status(tmp_path, Status(state="running"))
    assert read_status(tmp_path).state == "killed"
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_status(tmp_path).state == "running"
    assert read_status(tmp_path).state == "killed"
