"""Weave's own client, in its process, against a stand-in of W&B's two HTTP services."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from treadle.tracing import SinkReport, SpanError
from treadle.tracing.sinks.child_sink import ChildSink
from treadle.tracing.sinks.testing import (
    Answer,
    Request,
    child_environment,
    http_server,
    make_trace,
)
from treadle.tracing.sinks.weave import has_credentials

pytestmark = pytest.mark.timeout(180)


class Service:
    """Answers as W&B's GraphQL and Weave's trace server do; keeps the calls."""

    def __init__(self, *, refuse: bool = False) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self.authorizations: set[str] = set()
        self.ops: set[str] = set()
        self.calls: list[dict[str, Any]] = []

    def __call__(self, request: Request) -> Answer:
        with self._lock:
            self.authorizations.add(request.headers.get("authorization", ""))
            return self._answer(request)

    def _answer(self, request: Request) -> Answer:
        if request.path == "/graphql":
            project = {"id": "1", "name": "gsm8k", "entityName": "team"}
            return _json(
                data={
                    "viewer": {"username": "me", "defaultEntity": {"name": "team"}},
                    "project": project,
                    "upsertModel": {"project": project, "inserted": True},
                }
            )
        if request.path == "/server_info":
            return _json(min_required_weave_python_version="0.0.1", trace_server_version="99.0.0")
        if request.path == "/obj/create":
            self.ops.add(json.loads(request.body)["obj"]["object_id"])
            return _json(digest="digest", object_id="op")
        if request.path == "/file/create":
            return _json(digest="digest")
        assert request.path == "/v2/team/gsm8k/calls/complete", request.path
        if self._refuse:
            return 400, "application/json", b'{"detail": "over the plan"}'
        self.calls += json.loads(request.body)["batch"]
        return _json()


def _json(**values: object) -> Answer:
    return 200, "application/json", json.dumps(values).encode()


def make_sink(tmp_path: Path, address: str) -> ChildSink:
    environment = child_environment(
        WANDB_API_KEY="k" * 40,
        WANDB_BASE_URL=address,
        WF_TRACE_SERVER_URL=address,
        WANDB_ERROR_REPORTING="false",
        WEAVE_SERVER_CACHE_DIR=str(tmp_path / "cache"),
    )
    return ChildSink(
        "weave",
        {"project": "gsm8k", "run_id": "run1"},
        environment=environment,
        log_path=tmp_path / "weave.log",
        close_timeout_s=150.0,  # Its import may take long.
    )


def test_calls_have_their_tree_content_times_error_and_run(tmp_path: Path) -> None:
    service, error = Service(), SpanError(type="ToolError", message="broke")
    with http_server(service) as address, make_sink(tmp_path, address) as sink:
        traces = [make_trace(step=step, error=error) for step in range(30)]
        # As they end side by side; the last trace never gets its root.
        for spans in zip(*traces, strict=True):
            for span in spans[:-1] if spans[0].parent_id is None else spans:
                sink.record(span)
        report = sink.close()
    assert report == SinkReport(written=119, dropped=0, failed=0), (
        tmp_path / "weave.log"
    ).read_text()
    assert len(service.authorizations) == 1 and "" not in service.authorizations
    assert service.ops == {"trajectory", "turn", "generate", "tool"}

    ours = {call["attributes"]["treadle"]["span_id"]: call for call in service.calls}
    assert set(ours) == {s.span_id for trace in traces for s in trace} - {traces[-1][-1].span_id}
    ids = {call["id"]: call["attributes"]["treadle"]["span_id"] for call in service.calls}
    for trace in traces[:-1]:
        assert len({ours[span.span_id]["trace_id"] for span in trace}) == 1
        for span in trace:
            parent = ours[span.span_id]["parent_id"]
            assert (None if parent is None else ids[parent]) == span.parent_id
    generate, tool, turn, root = (ours[span.span_id] for span in traces[7])
    assert root["op_name"] == "weave:///team/gsm8k/op/trajectory:digest"
    assert root["inputs"] == {"task_id": "t"}
    assert root["output"] == {"messages": [{"role": "user", "content": "grüß"}]}
    assert (root["attributes"]["step"], root["attributes"]["experiment_name"]) == (7, "run")
    assert (root["wb_run_id"], root["wb_run_step"]) == ("team/gsm8k/run1", 7)
    assert json.loads(root["exception"])["type"] == "ToolError"
    assert json.loads(tool["exception"])["message"] == "division by zero"
    assert turn["exception"] is None
    assert generate["started_at"] == "2023-11-14T22:13:22Z"
    assert generate["ended_at"] == "2023-11-14T22:13:25Z"


def test_what_the_service_refuses_is_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with http_server(Service(refuse=True)) as address, make_sink(tmp_path, address) as sink:
        for span in make_trace():
            sink.record(span)
        assert sink.close() == SinkReport(written=0, dropped=0, failed=4)
    assert "traces to weave: cannot write" in caplog.text


def test_where_the_key_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert not has_credentials()
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password key\n")
    netrc.chmod(0o600)
    assert has_credentials()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not has_credentials()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert has_credentials()
