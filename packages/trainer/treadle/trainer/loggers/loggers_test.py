"""Loggers in processes of their own: what they are told, and that none of them can harm a run."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.demo import DEMO
from treadle.trainer.loggers.logger_process import LoggerProcess
from treadle.trainer.loggers.loggers import Loggers, open_loggers
from treadle.trainer.loggers.run_logger import Table
from treadle.trainer.loggers.testing import brittle

pytestmark = pytest.mark.timeout(120)

_TABLE = Table(name="val/generations", columns=("prompt", "reward"), rows=[("a", 1.0)])


def _config(*names: str, limit: float = 60.0) -> Config:
    loggers = ",".join(brittle(name) for name in names)
    return load_config(
        [DEMO], [f"run.loggers=[{loggers}]", f"run.loggers_timeout_s={limit}"]
    ).config


async def _run(
    config: Config,
    run_dir: Path,
    *,
    first_step: int = 0,
    resumed_after: int | None = None,
    fails: bool = False,
    ends_when_taken: bool = False,
) -> None:
    async with open_loggers(
        config, run_dir, resumed_after=resumed_after, summary=lambda: {"reward": 0.5}
    ) as loggers:
        loggers.table(first_step, _TABLE)
        for step in range(first_step, first_step + 3):
            loggers.metrics(step, {"reward/mean": step / 4})
        if fails:
            raise ValueError("the run failed")
        while ends_when_taken and any(  # noqa: ASYNC110  -- threads count them
            each._taken < each._sent for each in loggers.processes
        ):
            await asyncio.sleep(0.01)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def _told(run_dir: Path, name: str = "Records") -> list[str]:
    return (run_dir / f"{name}.txt").read_text().splitlines()


def _steps(run_dir: Path, name: str) -> list[int]:
    return [int(line.split()[1]) for line in _told(run_dir, name) if line.startswith("metrics")]


def _write_metrics(run_dir: Path, count: int) -> None:
    lines = [json.dumps({"step": step, "reward/mean": 0.5}) for step in range(count)]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_logger_is_told_of_the_run_its_steps_tables_and_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asyncio.run(_run(_config("Records"), tmp_path))
    assert _told(tmp_path) == [
        "start treadle demo calculator None",
        "table 0 val/generations 2x1",
        "metrics 0 {'reward/mean': 0.0}",
        "metrics 1 {'reward/mean': 0.25}",
        "metrics 2 {'reward/mean': 0.5}",
        "finished {'reward': 0.5}",
    ]
    assert _warnings(caplog) == []


def test_a_failed_run_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the run failed"):
        asyncio.run(_run(_config("Records"), tmp_path, fails=True))
    assert _told(tmp_path)[-1] == "failed {'reward': 0.5}"


def test_a_resumed_run_repeats_no_step_and_gives_those_after_the_last_that_was_taken(
    tmp_path: Path,
) -> None:
    asyncio.run(_run(_config("RaisesAtAStep"), tmp_path))  # step 1 is lost, then the run is killed
    asyncio.run(_run(_config("RaisesAtAStep"), tmp_path, first_step=1, resumed_after=0))
    told = _told(tmp_path, "RaisesAtAStep")
    assert _steps(tmp_path, "RaisesAtAStep") == [0, 2, 3]
    assert "start treadle demo calculator 0" in told
    # Steps 4 and 5 are those after the last that it took; step 1 stays lost.
    _write_metrics(tmp_path, 6)
    both = _config("RaisesAtAStep", "Records")
    asyncio.run(_run(both, tmp_path, first_step=6, resumed_after=5))
    assert _steps(tmp_path, "RaisesAtAStep") == [0, 2, 3, 4, 5, 6, 7, 8]
    # A logger that is added later gets all steps that the run keeps.
    assert _steps(tmp_path, "Records") == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_steps_from_the_file_do_not_count_as_records_that_were_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _write_metrics(tmp_path, 10)
    config = _config("HangsAtTheEnd", limit=1)
    asyncio.run(_run(config, tmp_path, first_step=10, resumed_after=9, ends_when_taken=True))
    assert len(_steps(tmp_path, "HangsAtTheEnd")) == 13
    (said,) = _warnings(caplog)
    assert "has not finished within 1 s and is ended: 1 records may be missing" in said


@pytest.mark.parametrize("text", ['{"metrics": ', "[]", '{"metrics": "3"}', "\xff"])
def test_a_damaged_state_file_is_named_with_what_mends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    state = tmp_path / "loggers" / "Records.json"
    state.parent.mkdir()
    state.write_bytes(text.encode("latin-1"))
    asyncio.run(_run(_config("Records"), tmp_path))
    (said,) = _warnings(caplog)
    assert f"logger Records failed at its start and logs nothing: SetupError: {state}" in said
    assert "is damaged: " in said
    assert "Remove it" in said
    assert not (tmp_path / "Records.txt").exists()


def test_a_damaged_metrics_file_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": "high"}\n{"step": 1}\n')
    asyncio.run(_run(_config("Records"), tmp_path, first_step=2, resumed_after=1))
    (said,) = _warnings(caplog)
    assert "failed at its start and logs nothing: ValueError: " in said
    assert "metrics.jsonl is damaged: 'reward/mean' of step 0" in said


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("RaisesAtStart", "failed at its start and logs nothing: ConnectionError: no account"),
        ("HangsAtStart", "has not finished within 2 s and is ended: 5 records may be missing"),
        ("RaisesAtAStep", "failed at the metrics of step 1: ConnectionError: no network"),
        ("HangsAtAStep", "has not finished within 2 s and is ended"),
        ("Dies", "exited with status 3, and logs nothing more"),
        ("RaisesAtTheEnd", "failed at the end: SystemExit: over"),
        ("HangsAtTheEnd", "has not finished within 2 s and is ended"),
    ],
)
def test_a_logger_that_fails_or_hangs_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, warning: str
) -> None:
    limit = 2 if name.startswith("Hangs") else 60
    asyncio.run(_run(_config(name, limit=limit), tmp_path))
    (said,) = _warnings(caplog)
    assert f"logger {name} {warning}" in said
    assert f"the run continues; see {tmp_path}/logs/logger-{name}.log" in said


def test_a_logger_that_does_not_keep_up_loses_records_and_holds_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hello = {"logger": "not read before the test ends", "filler": "x" * 200_000}
    process = LoggerProcess("slow", hello, log_path=tmp_path / "slow.log", capacity=2)
    assert process._process is not None
    process._process.send_signal(19)  # SIGSTOP: it reads nothing, so the pipe is full
    for step in range(8):
        process.put({"kind": "metrics", "step": step, "values": {"filler": "x" * 200_000}})
    process.close({"kind": "finish", "end": "finished", "summary": {}}, deadline_s=0.2)
    (said,) = _warnings(caplog)
    assert "does not keep up: 2 records wait for it" in said
    assert process._lost >= 5


def test_without_loggers_no_process_is_started(tmp_path: Path) -> None:
    async def run() -> Loggers:
        config = load_config([DEMO], ["run.loggers=[console,jsonl]"]).config
        async with open_loggers(config, tmp_path, resumed_after=None, summary=dict) as loggers:
            return loggers

    assert asyncio.run(run()).processes == ()
    assert list(tmp_path.iterdir()) == []
