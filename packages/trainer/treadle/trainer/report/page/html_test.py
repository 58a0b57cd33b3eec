import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import Finding, Message, ToolError, Trajectory
from treadle.tracing import Metric
from treadle.trainer.report import summarize
from treadle.trainer.report.logged_groups import LoggedGroup, LoggedGroups, without_ids
from treadle.trainer.report.metrics import Record
from treadle.trainer.report.page import html
from treadle.trainer.report.page.html import flatten, render_html, trace_bars
from treadle.trainer.report.status import Status
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
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href")]
        self.scripts += tag == "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(
    *lines: Mapping[str, Any],
    records: Sequence[Record] = RECORDS,
    status: Status = Status(state="finished"),  # noqa: B008
    notes: Sequence[tuple[int, str]] = (),
) -> tuple[str, Reader]:
    """Returns the page of a run with one group of these lines, and what a browser reads in it."""
    slim = tuple(without_ids(dict(line)) for line in lines)
    groups = [LoggedGroup(step=3, phase="train", task_id="t", lines=slim)]
    page = render_html(
        title="A run & more",
        run_dir=Path("runs/a"),
        status=status,
        summary=summarize(records),
        records=records,
        logged=LoggedGroups(groups=tuple(groups if lines else ()), num_trajectories=len(lines)),
        notes=notes,
        config={"model": {"path": "models/a"}, "data": {"shuffle": True, "limit": None}},
    )
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert reader.links == []
    assert reader.scripts == 1
    return page, reader


def line(trajectory: Trajectory, **more: Any) -> dict[str, object]:
    return to_record(
        trajectory, step=3, phase="train", decode=lambda ids: f"[{len(ids)} ids]", **more
    )


def test_the_report_is_one_file_that_needs_no_other() -> None:
    _, reader = read()
    assert "A run & more" in reader.text
    assert "None were logged." in reader.text
    for text in ("model.path", "models/a", "data.limit", "null", "50.0%", "0.250", "runs/a"):
        assert text in reader.text


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status(state="running"), "The run is in progress"),
        (Status(state="running", ends_at="2026-01-02T03:04:05+00:00"), "end at 2026-01-02T03:04"),
        (Status(state="failed", error="ToolError: <b>down</b>"), "ToolError: <b>down</b>"),
        (Status(state="interrupted"), "was interrupted"),
        (Status(state="killed"), "was killed"),
        (Status(state="unknown"), "an older version"),
    ],
)
def test_the_state_of_the_run_is_at_the_top(status: Status, text: str) -> None:
    _, reader = read(status=status)
    assert text in reader.text.partition("Summary")[0]
    assert "The last step logged is 1." in reader.text


def test_notes_are_shown_the_latest_first() -> None:
    _, reader = read(notes=[(1, "no group has signal"), (7, "the gradient explodes")])
    assert reader.text.index("the gradient explodes") < reader.text.index("no group has signal")
    _, reader = read(notes=[(step, "again") for step in range(1000)])
    assert "The last 200 of 1000 notes" in reader.text
    assert "Notes" not in read()[1].text


def test_a_trajectory_shows_its_messages_calls_tokens_and_advantage() -> None:
    page, reader = read(line(make_trajectory(metrics=[Metric("tool/calls", 1.0)]), advantage=0.5))
    for text in ("What is 6 * 7?", 'calculator(expression="6*7")', "#### 42", "tool/calls 1"):
        assert text in reader.text
    assert "advantage +0.500" in reader.text
    assert page.count('<span class="sampled" title="sampled, ') == 2
    assert 'title="observed, 5 tokens">[5 ids]</span>' in page


def test_a_group_shows_all_attempts_at_a_row_together() -> None:
    lines = [
        line(
            make_trajectory(task=make_task(rollout_index=i), reward=reward), advantage=reward - 0.5
        )
        for i, reward in [(1, 0.0), (0, 1.0)]
    ]
    page, reader = read(*lines)
    assert page.count('<details class="group"') == 1
    assert page.count('<details class="trajectory"') == 2
    assert page.index('data-index="0"') < page.index('data-index="1"')
    assert "2 of this row · mean reward 0.5" in reader.text
    assert 'data-mean="0.5" data-spread="1.0"' in page
    assert 'title="rollout 1, advantage -0.500">0</span>' in page


def test_a_run_of_an_older_version_is_shown_without_what_it_lacks() -> None:
    kept = ("step", "phase", "task_id", "rollout_index", "reward", "stop", "messages")
    old = {key: value for key, value in line(make_trajectory()).items() if key in kept}
    _, reader = read(old)
    assert "#### 42" in reader.text
    assert "advantage +" not in reader.text


def test_every_sample_and_finding_of_a_trajectory_is_shown() -> None:
    one = make_trajectory()
    finding = Finding(kind="malformed_call", text="Expecting value: {oops}")
    _, reader = read(line(replace(one, samples=one.samples * 2, findings=(finding,))))
    for text in ("Tokens of sample 1", "Tokens of sample 2", "malformed call", "{oops}"):
        assert text in reader.text


def test_what_a_run_writes_is_shown_and_never_run() -> None:
    evil = "</script></style><script>alert('x')</script>\"'><img src=http://evil/x.png>"
    task = make_task(task_id=evil, messages=[Message(role="user", content=evil)])
    trajectory = make_trajectory(task=task, answer=evil, metrics=[Metric(evil, 1.0)])
    page, reader = read(
        to_record(trajectory, step=1, phase="val", decode=lambda _: evil),
        records=[{"step": 1, f"reward/{evil}": 0.5, evil: 1.0}],
        status=Status(state="failed", error=evil),
        notes=[(1, evil)],
    )
    assert evil in reader.text
    assert "<script>alert" not in page


def test_a_failed_trajectory_and_one_without_reward_are_shown() -> None:
    failed = Trajectory.failed(make_task(), ToolError("sandbox down"))
    place = 'File "my_tool.py", line 7, in run'
    page, reader = read({**line(failed), "traceback": place}, line(make_trajectory(reward=None)))
    assert "ToolError: sandbox down" in reader.text
    assert place in reader.text
    assert 'data-outcome="none"' in page
    assert "mean reward none" in reader.text
    assert "not trained on" in reader.text


def test_the_page_is_bounded_and_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_CHARACTERS", 20_000)
    lines = [line(make_trajectory(answer="long " * 100_000)) for _ in range(2)]
    lines += [
        line(replace(make_trajectory(), messages=(Message(role="tool", content=""),) * 10_000))
    ]
    page, reader = read(*lines)
    assert len(page) < 100_000
    assert "The rest is left out of this page" in reader.text
    assert "20,000 characters" in " ".join(reader.text.split())


def test_a_long_run_has_a_table_and_curves_of_bounded_size() -> None:
    page, reader = read(records=[{"step": step, "actor/loss": 0.5} for step in range(20_000)])
    assert "500 of 20000 steps" in reader.text
    assert len(page) < 150_000


def test_the_bars_of_a_trace_lie_within_the_whole() -> None:
    def span(name: str, start: int, duration: int) -> dict[str, object]:
        return {"name": name, "start_unix_ns": start, "duration_ns": duration, "error": None}

    bars = trace_bars({"trace": [span("trajectory", 1000, 4000), span("turn", 2000, 1000)]})
    assert [(bar.left, bar.width) for bar in bars] == [(0.0, 100.0), (25.0, 25.0)]
    assert bars[1].milliseconds == pytest.approx(0.001)
    assert trace_bars({"trace": []}) == trace_bars({}) == []


def test_a_nested_configuration_is_flattened() -> None:
    config = {"a": {"b": {"c": 1}, "d": []}, "e": None, "f": {}}
    assert flatten(config) == [("a.b.c", "1"), ("a.d", "[]"), ("e", "null"), ("f", "{}")]
