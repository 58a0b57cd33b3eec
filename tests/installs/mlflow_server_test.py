"""Traces in a real MLflow server with SQLite, which is installed as its users install it."""

import importlib.metadata
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from installs.foreign import environment, make_venv, run
from treadle.tracing import FinishedSpan
from treadle.tracing.sinks.mlflow import MlflowWriter

STARTS_WITHIN_S = 300.0


@pytest.fixture(scope="module")
def server(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server, of the version of our client."""
    folder = tmp_path_factory.mktemp("mlflow")
    python = make_venv(folder / "venv", programs) / "python"
    version = importlib.metadata.version("mlflow-skinny")
    run(
        [programs / "uv", "pip", "install", "-q", "--python", python, f"mlflow=={version}"],
        cwd=folder,
        env=environment(programs),
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = ("--backend-store-uri", f"sqlite:///{folder}/mlruns.db")
    command = [
        str(python),
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        *store,
    ]
    # Each of its processes imports all of MLflow: by default four workers and those of its jobs.
    env = environment() | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, folder / "log")
        yield address
    finally:
        process.terminate()
        process.wait()


def _wait(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.2)


def test_traces_are_found_by_their_tags(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    writer = MlflowWriter("gsm8k_async_rl")
    writer.write([_trajectory(step, index) for step in (1, 2) for index in range(5)])
    writer.close(0)
    client = MlflowClient(tracking_uri=server)
    experiment = client.get_experiment_by_name("gsm8k_async_rl")
    assert experiment is not None
    found = client.search_traces(
        locations=[experiment.experiment_id], filter_string="tags.step = '1'"
    )
    assert {trace.info.tags["sample_index"] for trace in found} == set("01234")
    (span, *_) = found[0].data.spans
    assert (span.name, span.inputs) == ("trajectory", {"question": "What is 6 * 7?"})


def _trajectory(step: int, index: int) -> FinishedSpan:
    number = step * 100 + index
    return FinishedSpan(
        name="trajectory",
        trace_id=f"{number:032x}",
        span_id=f"{number:016x}",
        parent_id=None,
        start_unix_ns=1_700_000_000_000_000_000,
        duration_ns=5_000_000,
        attributes={
            "step": step,
            "sample_index": index,
            "inputs": {"question": "What is 6 * 7?"},
        },
        error=None,
    )
