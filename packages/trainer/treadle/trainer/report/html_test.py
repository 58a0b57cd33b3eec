import math
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from treadle.agent_loop import Finding, Message, ToolError, Trajectory
from treadle.tracing import Metric
from treadle.trainer.report import summarize
from treadle.trainer.report.html import flatten, thin_out, trace_bars, write_html
from treadle.trainer.report.metrics import Record
from treadle.trainer.report.testing import make_task, make_trajectory
from treadle.trainer.report.trajectories import to_record

RECORDS: list[Record] = [
    {"step": 0, "val/reward": 0.5, "val/accuracy": 0.5},
    {"step": 1, "reward/mean": 0.25, "tool/call_rate": math.nan, "time/step_s": 2.0},
]


class Reader(HTMLParser):
    """Collects text, attributes that lead outside, and checks that tags match."""

    VOID = frozenset({"meta", "img", "br", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def write(path: Path, *trajectories: Mapping[str, object]) -> Reader:
    write_html(
        path,
        title="A run & more",
        run_dir=Path("runs/a"),
        summary=summarize(RECORDS),
        records=RECORDS,
        trajectories=trajectories,
        config={"model": {"path": "models/a"}, "data": {"shuffle": True, "limit": None}},
        curves=b"\x89PNG",
    )
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


def test_the_report_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    reader = write(tmp_path / "report.html")
    assert reader.links == ["data:image/png;base64,iVBORw=="]
    assert "A run & more" in reader.text
    assert "None were logged." in reader.text
    for text in ("model.path", "models/a", "data.limit", "null", "50.0%", "0.250", "runs/a"):
        assert text in reader.text


def test_a_trajectory_shows_its_messages_calls_and_tokens(tmp_path: Path) -> None:
    trajectory = make_trajectory(metrics=[Metric("tool/calls", 1.0)])
    record = to_record(trajectory, step=3, phase="train", decode=lambda ids: f"[{len(ids)} ids]")
    reader = write(tmp_path / "report.html", record)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in ("What is 6 * 7?", 'calculator(expression="6*7")', "#### 42", "tool/calls 1"):
        assert text in reader.text
    assert page.count('<span class="sampled" title="sampled, ') == 2
    assert 'title="observed, 5 tokens">[5 ids]</span>' in page
    assert 'data-phase="train" data-step="3" data-reward="high"' in page


def test_every_sample_and_finding_of_a_trajectory_is_shown(tmp_path: Path) -> None:
    one = make_trajectory()
    finding = Finding(kind="malformed_call", text="Expecting value: {oops}")
    two = replace(one, samples=one.samples * 2, findings=(finding,))
    reader = write(tmp_path / "report.html", to_record(two, step=3, phase="train", decode=None))
    for text in ("Tokens of sample 1", "Tokens of sample 2", "malformed call", "{oops}"):
        assert text in reader.text


def test_what_a_model_writes_is_shown_and_never_run(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"><img src=http://evil/x.png>"
    task = make_task(task_id=evil)
    record = to_record(
        make_trajectory(task=task, answer=evil), step=1, phase="val", decode=lambda _: evil
    )
    reader = write(tmp_path / "report.html", record)
    assert len(reader.links) == 1
    assert evil in reader.text
    assert "<script>alert" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_failed_trajectory_and_one_without_reward_are_shown(tmp_path: Path) -> None:
    failed = Trajectory.failed(make_task(), ToolError("sandbox down"))
    reader = write(
        tmp_path / "report.html",
        to_record(failed, step=1, phase="train", decode=None),
        to_record(make_trajectory(reward=None), step=1, phase="train", decode=None),
    )
    assert "ToolError: sandbox down" in reader.text
    assert "failed" in reader.text
    assert "none" in reader.text


def test_a_conversation_without_a_user_is_shown(tmp_path: Path) -> None:
    task = make_task(messages=[Message(role="system", content="Say something. \ud83d")])
    record = to_record(make_trajectory(task=task), step=1, phase="val", decode=None)
    assert "Say something. ?" in write(tmp_path / "report.html", record).text


def test_the_bars_of_a_trace_lie_within_the_whole() -> None:
    def span(name: str, start: int, duration: int) -> dict[str, object]:
        return {"name": name, "start_unix_ns": start, "duration_ns": duration, "error": None}

    bars = trace_bars({"trace": [span("trajectory", 1000, 4000), span("turn", 2000, 1000)]})
    assert [(bar.left, bar.width) for bar in bars] == [(0.0, 100.0), (25.0, 25.0)]
    assert bars[1].milliseconds == pytest.approx(0.001)
    assert trace_bars({"trace": []}) == trace_bars({}) == []


def test_many_trajectories_are_thinned_out_evenly() -> None:
    many: list[Mapping[str, object]] = [{"step": step} for step in range(1000)]
    thin = thin_out(many, 10)
    assert [t["step"] for t in thin] == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert thin_out(many[:10], 10) == many[:10]


def test_a_nested_configuration_is_flattened() -> None:
    config = {"a": {"b": {"c": 1}, "d": []}, "e": None, "f": {}}
    assert flatten(config) == [("a.b.c", "1"), ("a.d", "[]"), ("e", "null"), ("f", "{}")]
