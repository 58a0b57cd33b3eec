"""Each logger of the table writes with its real client; a resumed run continues in the same place.

The run is killed after step 2 and resumed after step 1, so step 2 is given twice.
"""

import asyncio
import json
import logging
import math
import sqlite3
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.loggers.loggers import Loggers, open_loggers
from treadle.trainer.loggers.run_logger import Table
from treadle.trainer.report.warning_signs import Alert

pytestmark = pytest.mark.timeout(400)

_TABLE = Table(
    name="val/generations",
    columns=("prompt", "answer", "reward"),
    rows=[("2 | 3?", "#### 5\nyes", 1.0), ("no answer", "", None)],
)
_ALERT = Alert("no_signal", "every reward is 0")
Logged = Mapping[str, Mapping[int, float]]


def _log(loggers: Loggers, steps: range, *, again: bool) -> None:
    for step in steps:
        loggers.table(step, _TABLE)
        values = {"reward/mean": step / 8, "val/reward/best@2": 1.0}
        loggers.metrics(step, values | ({} if again else {"not_finite": math.nan}))
        loggers.alert(step, _ALERT)


@pytest.fixture
def log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Any]:
    """Logs a run that is interrupted and resumed; nothing may have gone wrong."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    async def run(name: str) -> None:
        arguments = [f"run.loggers=[{name}]", "run.loggers_timeout_s=150"]
        config = load_config([DEMO], arguments).config
        with pytest.raises(KeyboardInterrupt):
            async with open_loggers(config, tmp_path, resumed_after=None, summary=dict) as loggers:
                _log(loggers, range(3), again=False)
                raise KeyboardInterrupt
        async with open_loggers(
            config, tmp_path, resumed_after=1, summary=lambda: {"reward": 0.5}
        ) as loggers:
            _log(loggers, range(2, 5), again=True)

    yield lambda name: asyncio.run(run(name))
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def _rewards(*steps: int) -> dict[int, float]:
    return {step: step / 8 for step in steps}


def test_wandb_offline(log: Any, tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2 as pb

    log("wandb")
    found: dict[int, float] = {}
    runs, alerts, tables = [], [], 0
    summary: dict[str, str] = {}
    for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb")):
        for data in _leveldb_records(path.read_bytes()):
            record = pb.Record.FromString(data)
            if record.HasField("run"):
                runs.append(record.run)
            elif record.HasField("history"):
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                step = record.history.step.num or items["_step"]
                assert step not in found
                found[step] = items["reward/mean"]
                tables += items["val/generations.nrows"] == 2
            elif record.HasField("alert"):
                alerts.append((record.alert.title, record.alert.text))
            elif record.HasField("summary"):
                summary |= {item.key: item.value_json for item in record.summary.update}
    assert found == _rewards(0, 1, 2, 3, 4)
    assert tables == 5
    assert alerts == [("no_signal", f"step {step}: every reward is 0") for step in range(5)]
    assert summary["summary/reward"] == "0.5"
    ids = {run.run_id for run in runs}
    assert ids == {(tmp_path / "loggers" / "run_id").read_text()}
    assert {(run.project, run.display_name) for run in runs} == {("treadle demo", "calculator")}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["rollout"]["samples_per_prompt"] == 8


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Yields the records of a .wandb file: LevelDB's log format, after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_tensorboard(log: Any, tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    log("tensorboard")
    files = sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2
    events = [[Event.FromString(data) for data in _tf_records(f.read_bytes())] for f in files]
    assert [_scalars(each)["reward/mean"] for each in events] == [
        _rewards(0, 1, 2),
        _rewards(2, 3, 4),
    ]
    # What is before this event and not before its step is dropped by TensorBoard.
    starts = [e.step for e in events[1] if e.HasField("session_log") and e.session_log.status == 1]
    assert starts == [2]
    texts = {
        value.tag: value.tensor.string_val[0].decode()
        for event in events[0]
        for value in event.summary.value
        if value.HasField("tensor")
    }
    assert '"samples_per_prompt": 8' in texts["config/text_summary"]
    assert "| 2 \\| 3? | #### 5<br>yes | 1 |" in texts["val/generations/text_summary"]
    assert texts["alerts/no_signal/text_summary"] == "every reward is 0"


def _tf_records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += length + 16


def _scalars(events: list[Any]) -> Logged:
    found: dict[str, dict[int, float]] = {}
    for event in events:
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_mlflow(log: Any, tmp_path: Path) -> None:
    log("mlflow")
    # By SQL: importing MLflow here too would take longer than all else.
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        read = database.execute
        experiments = read(
            "select r.name, r.status, e.name from runs r "
            "join experiments e on e.experiment_id = r.experiment_id"
        ).fetchall()
        metrics = read("select key, step, value from metrics").fetchall()
        params = dict(read("select key, value from params").fetchall())
        tags = dict(read("select key, value from tags").fetchall())
    assert experiments == [("calculator", "FINISHED", "treadle demo")]
    history = [(step, value) for key, step, value in metrics if key == "reward/mean"]
    assert sorted(history) == list(_rewards(0, 1, 2, 3, 4).items())
    assert {key for key, _, _ in metrics} == {"reward/mean", "val/reward/best_at_2"}
    assert params["rollout.samples_per_prompt"] == "8"
    assert tags["summary.reward"] == "0.5"
    assert tags["alert.no_signal"] == "step 4: every reward is 0"
    tables = sorted(tmp_path.glob("mlartifacts/**/val/generations/*.json"))
    assert len(tables) == 5
    assert json.loads(tables[0].read_text())["data"][0] == ["2 | 3?", "#### 5\nyes", 1.0]


def test_trackio(log: Any, tmp_path: Path) -> None:
    log("trackio")
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        lines = database.execute("select run_name, step, metrics from metrics").fetchall()
        alerts = database.execute("select title, text, step from alerts").fetchall()
        (config,) = database.execute("select config from configs").fetchone()
    assert {name for name, _, _ in lines} == {
        f"calculator-{(tmp_path / 'loggers' / 'run_id').read_text()}"
    }
    logged = [(step, json.loads(values)) for _, step, values in lines]
    rewards = [(step, each["reward/mean"]) for step, each in logged if "reward/mean" in each]
    assert sorted(rewards) == list(_rewards(0, 1, 2, 3, 4).items())
    assert sum("val/generations" in each for _, each in logged) == 5
    assert sorted(alerts, key=lambda alert: alert[2]) == [
        ("no_signal", "every reward is 0", step) for step in range(5)
    ]
    assert json.loads(config)["rollout"]["samples_per_prompt"] == 8
