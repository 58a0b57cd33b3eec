"""The app, driven by Textual's pilot on real files."""

import asyncio
import contextlib
import json
import shutil
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from textual.coordinate import Coordinate
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, OptionList, Static
from textual.worker import WorkerCancelled
from textual_plotext import PlotextPlot

from treadle.tracing.terminal import app as app_module
from treadle.tracing.terminal.app import RunApp
from treadle.tracing.terminal.conversation import ConversationScreen, conversation
from treadle.tracing.terminal.run_files import JsonLines, read_curves
from treadle.tracing.trajectories.run_directories import NotARunError
from treadle.tracing.trajectories.testing import make_row, write_run


def log(run_dir: Path, *lines: Mapping[str, object], name: str = "metrics.jsonl") -> None:
    run_dir.mkdir(exist_ok=True)
    with (run_dir / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


async def settle(pilot: Pilot[None], shows: Callable[[], object] = lambda: True) -> None:
    """Waits for the threads, and until the app shows what they read.

    `shows` is asked again for a minute, since the pilot takes a busy machine for an idle app; what
    it asks is asserted afterwards, with a better message.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while True:
                while any(not worker.is_finished for worker in pilot.app.workers):
                    with contextlib.suppress(WorkerCancelled):  # A newer query took its place.
                        await pilot.app.workers.wait_for_complete()
                await pilot.pause()
                if shows():
                    return


async def filter_by(app: RunApp, pilot: Pilot[None], text: str) -> None:
    """Types a filter and submits it."""
    await pilot.press("slash")
    await settle(pilot, lambda: isinstance(app.focused, Input))
    app.query_one("#filter", Input).value = text
    await pilot.press("enter")


def said(app: RunApp) -> str:
    return str(app.query_one("#said", Static).render())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run")
    log(run, *({"step": step, "reward/mean": step / 4, "tool/calls": 3.0} for step in range(1, 4)))
    log(run, {"step": 2, "name": "drift", "text": "ids \x1b[31m drift"}, name="alerts.jsonl")
    return run


@pytest.mark.asyncio
async def test_curves_are_chosen_and_grow_with_the_run(run_dir: Path) -> None:
    app = RunApp([run_dir])
    async with app.run_test(size=(120, 40)) as pilot:
        metrics = app.query_one("#metrics", OptionList)
        await settle(pilot, lambda: metrics.options)
        assert [option.id for option in metrics.options] == ["reward/mean", "tool/calls"]
        plot = app.query_one(PlotextPlot)
        await settle(pilot, lambda: metrics.highlighted == 0)
        assert "reward/mean" in plot.plt.build()
        metrics.focus()
        await settle(pilot, lambda: app.focused is metrics)
        await pilot.press("down")
        await settle(pilot, lambda: "tool/calls" in plot.plt.build())
        assert "tool/calls" in plot.plt.build()
        assert "step 2: ids \\x1b[31m drift" in str(app.query_one("#alerts", Static).render())
        log(run_dir, {"step": 4, "reward/mean": 1.0, "own/metric": 7})
        await pilot.press("r")
        await settle(pilot, lambda: len(metrics.options) == 3 and metrics.highlighted == 2)
        names = [option.id for option in metrics.options]
        assert names == ["own/metric", "reward/mean", "tool/calls"]
        assert metrics.highlighted == 2  # the choice stays


@pytest.mark.asyncio
async def test_trajectories_are_filtered_and_opened(run_dir: Path) -> None:
    app = RunApp([run_dir])
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot, lambda: said(app) == "1 to 54 of 54")
        assert said(app) == "1 to 54 of 54"
        await filter_by(app, pilot, "tool=python phase=train step=3")
        table = app.query_one(DataTable)
        await settle(pilot, lambda: app.focused is table and table.row_count < 54)
        assert app.focused is table
        assert table.region.bottom <= 40
        assert 0 < table.row_count < 54
        assert said(app) == f"1 to {table.row_count} of {table.row_count}"
        await pilot.press("enter")
        await settle(pilot, lambda: isinstance(app.screen, ConversationScreen))
        assert isinstance(app.screen, ConversationScreen)
        shown = str(app.screen.query_one("#conversation", Static).render())
        assert "step 3  train" in shown
        assert "-> python(" in shown
        log(run_dir, {"step": 4, "reward/mean": 1.0})
        await pilot.press("r", "n", "slash")  # what is below is read anew, and stays below
        await settle(pilot)
        assert isinstance(app.screen, ConversationScreen)
        await pilot.press("escape")
        await settle(pilot, lambda: not isinstance(app.screen, ConversationScreen))
        assert not isinstance(app.screen, ConversationScreen)


@pytest.mark.asyncio
async def test_the_row_that_was_chosen_is_opened_though_the_table_has_shrunk(run_dir: Path) -> None:
    app = RunApp([run_dir])
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot, lambda: said(app) == "1 to 54 of 54")
        table = app.query_one(DataTable)
        last = table.row_count - 1
        step, phase, task_id, sample = (str(cell) for cell in table.get_row_at(last)[:4])
        key = table.coordinate_to_cell_key(Coordinate(last, 0)).row_key
        await filter_by(app, pilot, "phase=train step=3")
        await settle(pilot, lambda: table.row_count < last)
        assert table.row_count < last
        table.post_message(DataTable.RowSelected(table, last, key))  # was on its way
        await settle(pilot, lambda: isinstance(app.screen, ConversationScreen))
        assert isinstance(app.screen, ConversationScreen)
        shown = str(app.screen.query_one("#conversation", Static).render())
        assert f"step {step}  {phase}  {task_id}  rollout {sample}" in shown


@pytest.mark.asyncio
async def test_a_wrong_filter_says_why_until_it_is_right(run_dir: Path) -> None:
    app = RunApp([run_dir])
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot, lambda: said(app) == "1 to 54 of 54")
        await filter_by(app, pilot, "rewad<1")
        await settle(pilot, lambda: "did you mean" in said(app))
        assert "did you mean reward?" in said(app)
        app.action_reload()  # as every two seconds
        await settle(pilot)
        assert "did you mean reward?" in said(app)
        assert app.query_one(DataTable).row_count == 54
        app.query_one("#filter", Input).value = "reward<2"
        await pilot.press("enter")
        await settle(pilot, lambda: said(app) == "1 to 47 of 47")
        assert said(app) == "1 to 47 of 47"


@pytest.mark.asyncio
async def test_a_trajectory_whose_file_is_gone_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "_RELOAD_S", 3600.0)  # a reload takes the row away
    app = RunApp([run_dir])
    async with app.run_test(size=(160, 40), notifications=True) as pilot:
        await settle(pilot, lambda: said(app) == "1 to 54 of 54")
        await pilot.press("slash")
        await settle(pilot, lambda: isinstance(app.focused, Input))
        app.query_one(DataTable).focus()
        await settle(pilot, lambda: isinstance(app.focused, DataTable))

        def toasts() -> str:
            return "".join(str(toast.render()) for toast in app.query("Toast"))

        shutil.rmtree(run_dir / "trajectories")
        await pilot.press("enter")
        await settle(pilot, toasts)
        assert "gone or damaged" in toasts()


@pytest.mark.asyncio
async def test_pages_of_a_long_table(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1, rows=100, samples=3, val_rows=0)
    app = RunApp([run])
    async with app.run_test(size=(160, 40)) as pilot:
        await settle(pilot, lambda: said(app) == "1 to 200 of 300")
        app.query_one(DataTable).focus()
        await settle(pilot, lambda: isinstance(app.focused, DataTable))
        for key, text in (
            ("n", "201 to 300 of 300"),
            ("n", "201 to 300 of 300"),
            ("p", "1 to 200 of 300"),
        ):
            await pilot.press(key)
            await settle(pilot, lambda text=text: said(app) == text)  # type: ignore[misc]
            assert said(app) == text


@pytest.mark.asyncio
async def test_several_runs_and_a_damaged_file(run_dir: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", steps=1)
    log(other, {"step": 1, "reward/mean": 0.1})
    (other / "trajectories" / "step-000001-val.parquet").write_bytes(b"PAR1")
    app = RunApp([run_dir, other])
    async with app.run_test(size=(160, 40)) as pilot:
        plot = app.query_one(PlotextPlot)
        await settle(pilot, lambda: {"run", "other"} <= set(plot.plt.build().split()))
        assert {"run", "other"} <= set(plot.plt.build().split())
        app.query_one("#run").value = 1  # type: ignore[attr-defined]
        await settle(pilot, lambda: said(app).startswith("1 to 16 of 16"))
        assert said(app) == "1 to 16 of 16; left out: step-000001-val.parquet"


@pytest.mark.asyncio
async def test_what_a_thread_has_read_when_the_app_has_ended_is_not_shown(run_dir: Path) -> None:
    app = RunApp([run_dir])
    async with app.run_test() as pilot:
        await settle(pilot)
    await asyncio.to_thread(app._show_from_thread, app._show_metrics)


def test_a_directory_of_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotARunError, match=f"{tmp_path} is not a run directory"):
        RunApp([tmp_path])


def test_what_a_model_wrote_is_inert() -> None:
    row = make_row(1, "train", 0, 1)
    evil = "\x1b]0;title\x07[bold]x[/bold]\u202egnp.exe\u200b\x9b2J"
    row |= {"messages": json.dumps([{"role": "assistant", "content": evil, "name": evil}])}
    row |= {"error": evil, "traceback": evil, "answer": evil, "task_id": evil}
    row["findings"] = [{"kind": evil, "text": evil}]
    text = conversation(row).plain
    assert "[bold]x[/bold]" in text
    assert "\\x1b]0;title\\x07" in text
    assert "\\u202e" in text
    assert not {c for c in text if unicodedata.category(c) in {"Cc", "Cf"}} - {"\n"}


def test_a_log_that_is_being_written_or_damaged(tmp_path: Path) -> None:
    log_file = JsonLines(tmp_path / "metrics.jsonl")
    assert not log_file.reload()
    path = log_file.path
    path.write_text(
        '{"step": 1, "a": 1, "b": null, "c": "x", "d": true}\nnonsense\n[1]\n{"step": 2, "a"'
    )
    assert log_file.reload()
    assert not log_file.reload()
    assert (len(log_file.lines), log_file.damaged) == (1, 2)
    curves = read_curves(log_file.lines)
    assert (curves.steps, curves.values) == ({"a": [1]}, {"a": [1.0]})
    path.unlink()
    assert log_file.reload()
    assert log_file.lines == []
