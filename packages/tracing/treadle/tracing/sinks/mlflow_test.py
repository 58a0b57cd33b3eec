"""MLflow's own client writes to a database file, and reads it back."""

import subprocess
import sys
from pathlib import Path

import pytest

from treadle.tracing import SpanError
from treadle.tracing.sinks.mlflow import MlflowWriter, _alone, tracking_uri, ui_command
from treadle.tracing.sinks.testing import child_environment, make_span, make_trace

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite:///{tmp_path}/mlruns.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    return uri


def test_traces_are_found_by_their_tags_and_are_what_was_recorded(uri: str) -> None:
    from mlflow import MlflowClient

    writer = MlflowWriter("gsm8k_async_rl")
    failed = SpanError(type="ToolError", message="half \udc80")
    traces = [
        make_trace(step=step, sample_index=index, rollout_n=n, error=failed if step == 2 else None)
        for step in (1, 2)
        for index in range(5)
        for n in range(2)
    ]
    # A trace may arrive in several batches.
    spans = [span for trace in traces for span in trace]
    for start in range(0, len(spans), 7):
        writer.write(spans[start : start + 7])
    writer.write([make_span("update", step=1, nested={"a": (1, None)})])
    MlflowWriter("gsm8k_async_rl").close(0)  # an experiment that exists

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("gsm8k_async_rl")
    assert experiment is not None

    def find(text: str) -> list[object]:
        place = [experiment.experiment_id]
        return list(client.search_traces(locations=place, filter_string=text, max_results=500))

    assert len(find("tags.step = '1'")) == 11
    assert len(find("tags.step = '2' AND tags.sample_index = '3'")) == 2
    assert len(find("trace.status = 'ERROR'")) == 10
    (found,) = find("tags.step = '1' AND tags.sample_index = '0' AND tags.rollout_n = '1'")
    trace = traces[1]
    assert found.info.trace_id == f"tr-{trace[0].trace_id}"  # type: ignore[attr-defined]
    assert found.info.tags["experiment_name"] == "run"  # type: ignore[attr-defined]
    assert {
        (s.name, s.span_id, s.parent_id, s.start_time_ns, s.end_time_ns)
        for s in found.data.spans  # type: ignore[attr-defined]
    } == {(s.name, s.span_id, s.parent_id, s.start_unix_ns, s.end_unix_ns) for s in trace}
    by_name = {span.name: span for span in found.data.spans}  # type: ignore[attr-defined]
    assert by_name["tool"].inputs == {"expression": "1/0"}
    assert by_name["tool"].span_type == "TOOL"
    assert by_name["tool"].status.description == "ZeroDivisionError: division by zero"
    assert by_name["trajectory"].outputs == {"messages": [{"role": "user", "content": "grüß"}]}
    assert by_name["generate"].attributes["ids"] == [1, 2, 3]
    (update,) = find("trace.name = 'update'")
    assert update.data.spans[0].attributes["nested"] == {"a": [1, None]}  # type: ignore[attr-defined]


_FOUR = """
import os, sys
import mlflow.tracing.client, mlflow.entities
from treadle.tracing.sinks.mlflow import MlflowWriter
from treadle.tracing.sinks.testing import make_trace

children = []
for number in range(4):
    if not (child := os.fork()):
        writer = MlflowWriter("project")
        for index in range(25):
            writer.write(make_trace(step=number, sample_index=index))
        writer.close(0)
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_four_processes_write_at_once_and_lose_nothing(uri: str) -> None:
    from mlflow import MlflowClient

    # They make the database too, all at once.
    done = subprocess.run(
        [sys.executable, "-c", _FOUR], env=child_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "locked" not in done.stderr
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("project")
    assert experiment is not None
    found = client.search_traces(locations=[experiment.experiment_id], max_results=500)
    pairs = {(int(t.info.tags["step"]), int(t.info.tags["sample_index"])) for t in found}
    assert pairs == {(step, index) for step in range(4) for index in range(25)}
    assert all(len(trace.data.spans) == 4 for trace in found)


def test_where_the_traces_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert tracking_uri() == f"sqlite:///{tmp_path}/treadle/mlruns.db"
    assert ui_command(tracking_uri()) == (
        f"mlflow ui -h 127.0.0.1 -p 5000 --backend-store-uri {tracking_uri()}"
    )
    with _alone(tracking_uri()):
        assert (tmp_path / "treadle").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("XDG_STATE_HOME")
    assert tracking_uri() == f"sqlite:///{Path.home()}/.local/state/treadle/mlruns.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    assert ui_command(tracking_uri()) is None


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns"])
def test_a_directory_is_rejected(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ValueError, match="stores no spans"):
        tracking_uri()
