"""The sinks of a run, with OpenTelemetry's client in its process and an endpoint in the test."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from treadle.agent_loop import AgentTask, Message
from treadle.tracing import span, use_attributes
from treadle.tracing.sinks.testing import Answer, Request, http_server, otlp_spans
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.demo import DEMO
from treadle.trainer.tracing.run_tracing import run_tracing, span_attributes

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

_OK: Answer = (200, "application/x-protobuf", b"")


def make_config(*overrides: str) -> Config:
    return load_config([DEMO], ["run.name=calc", *overrides]).config


def make_task(index: int) -> AgentTask:
    message = Message(role="user", content="1+1?")
    return AgentTask(
        task_id=str(index), sample_index=index, rollout_index=0, loop="", messages=(message,)
    )


async def roll_out(config: Config, run_dir: Path, *, failing: int = -1) -> list[str]:
    """Traces a step of twenty trajectories; returns what the user was told."""
    notes: list[str] = []
    tasks = [make_task(index) for index in range(20)]
    async with run_tracing(config, run_dir, notes.append):
        with span_attributes(config, tasks, step=3, validate=False):
            for task in tasks:
                with (
                    use_attributes(sample_index=task.sample_index, rollout_n=0),
                    span("trajectory") as root,
                ):
                    with span("turn"):
                        pass
                    root.set(stop="error" if task.sample_index == failing else "answer")
    return notes


def traced(run_dir: Path) -> list[int]:
    lines = [json.loads(line) for line in (run_dir / "traces.jsonl").read_text().splitlines()]
    attributes = [line["attributes"] for line in lines if line["name"] == "trajectory"]
    assert all(each["experiment_name"] == "calc" and each["step"] == 3 for each in attributes)
    return [each["sample_index"] for each in attributes]


async def test_without_backends_nothing_is_written(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert await roll_out(make_config(), run_dir) == []
    assert not await asyncio.to_thread(run_dir.exists)


async def test_several_backends_get_the_same_spans(tmp_path: Path) -> None:
    requests: list[Request] = []

    def answer(request: Request) -> Answer:
        requests.append(request)
        return _OK

    with http_server(answer) as address:
        config = make_config("tracing.backends=[jsonl,otlp]", f"tracing.otlp_endpoint={address}")
        await roll_out(config, tmp_path)
    assert traced(tmp_path) == list(range(20))
    spans = [span for request in requests for span in otlp_spans(request)]
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert [s.span_id.hex() for s in spans] == [line["span_id"] for line in lines]


async def test_a_limited_number_of_samples_and_every_failure(tmp_path: Path) -> None:
    limited = make_config("tracing.backends=jsonl", "tracing.max_samples_per_step_per_worker=4")
    await roll_out(limited, tmp_path / "a")
    chosen = traced(tmp_path / "a")
    assert len(chosen) == 4
    failing = next(index for index in range(20) if index not in chosen)
    await roll_out(limited, tmp_path / "b", failing=failing)
    assert traced(tmp_path / "b") == sorted([*chosen, failing])


async def test_the_budget_counts_what_a_resumed_run_finds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await roll_out(make_config("tracing.backends=jsonl"), tmp_path)
    size = (tmp_path / "traces.jsonl").stat().st_size
    full = make_config("tracing.backends=jsonl", f"tracing.max_bytes={size}")
    await roll_out(full, tmp_path, failing=7)
    assert traced(tmp_path) == [*range(20), 7]
    assert "1 trajectories are traced, 0 were not chosen, 19 were left out" in caplog.text


async def test_how_mlflow_is_looked_at_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"sqlite:///{tmp_path}/mlruns.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    notes: list[str] = []
    async with run_tracing(make_config("tracing.backends=mlflow"), tmp_path, notes.append):
        pass
    assert notes == [
        f"traces in MLflow: mlflow ui -h 127.0.0.1 -p 5000 --backend-store-uri {uri}",
    ]


async def test_a_backend_that_hangs_delays_the_end_by_no_more_than_its_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, asked = threading.Event(), threading.Event()

    def wait(_: Request) -> Answer:
        asked.set()
        go_on.wait()
        return _OK

    with http_server(wait) as address:
        config = make_config(
            "tracing.backends=[otlp,jsonl]",
            f"tracing.otlp_endpoint={address}",
            "run.loggers_timeout_s=0.1",
        )
        async with run_tracing(config, tmp_path, print):
            with use_attributes(step=3, experiment_name="calc", sample_index=1), span("trajectory"):
                pass
            assert await asyncio.to_thread(asked.wait, 60)
        go_on.set()
    assert traced(tmp_path) == [1]
    assert "traces to otlp is incomplete: 0 span(s) written, 1 dropped" in caplog.text
