"""The app: curves of one or several runs, and the trajectories of one of them.

Every two seconds, and when `r` is pressed, threads read the metrics and query the table again; the
event loop shows what comes back, unless a newer query has been asked meanwhile, or the app has
ended. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import (
    DataTable,
    Footer,
    Input,
    OptionList,
    Select,
    Static,
    TabbedContent,
    TabPane,
)
from textual.widgets.option_list import Option
from textual_plotext import PlotextPlot

from treadle.tracing.inert import inert
from treadle.tracing.terminal.conversation import ConversationScreen
from treadle.tracing.terminal.run_files import Curves, JsonLines, read_curves
from treadle.tracing.trajectories import Filter, FilterError, TrajectoryFiles
from treadle.tracing.trajectories.run_directories import METRICS, name_runs

__all__ = ["RunApp", "run"]

_RELOAD_S: Final = 2.0
_PAGE: Final = 200
"""Rows of the table; the next ones are a page further."""
_FIRST: Final = "reward/mean"
_IDENTITY: Final = ("step", "phase", "task_id", "rollout_index")
_COLUMNS: Final = (
    *(*_IDENTITY, "reward", "advantage", "stop", "num_turns"),
    *("num_tokens", "duration_s", "drift", "tools", "prompt"),
)
_HEADS: Final = {
    "rollout_index": "#",
    "num_turns": "turns",
    "num_tokens": "tokens",
    "duration_s": "s",
}
_WIDEST: Final = 60


class _Run:
    """One run directory.

    Args:
        directory: Where the run writes, or wrote.
        name: A number that is unique among the runs.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.name = inert(name)
        self.metrics = JsonLines(directory / METRICS)
        self.alerts = JsonLines(directory / "alerts.jsonl")
        self.trajectories = TrajectoryFiles(directory)
        self.curves = Curves()

    def reload(self) -> None:
        """Reads what has changed."""
        if self.metrics.reload():
            self.curves = read_curves(self.metrics.lines)
        self.alerts.reload()


class RunApp(App[None]):
    """Shows run directories until the user quits.

    Args:
        directories: There is at least one, never none.

    Raises:
        NotARunError: A directory is none of a run.
    """

    TITLE = "treadle"
    CSS = """
    #metrics { width: 36; }
    #alerts { height: auto; max-height: 6; color: $warning; }
    #said { height: auto; }
    #table { height: 1fr; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("r", "reload", "Reload"),
        ("slash", "filter", "Filter"),
        ("n", "page(1)", "Next page"),
        ("p", "page(-1)", "Previous page"),
        ("q", "quit", "Quit"),
    ]

    def __init__(self, directories: Sequence[Path]) -> None:
        super().__init__()
        self._runs = [_Run(path, name) for path, name in name_runs(directories).items()]
        self._metric = _FIRST
        self._filter = Filter()
        self._filter_error = ""
        self._page = 0
        self._num_found = 0

    def compose(self) -> ComposeResult:
        """Yields the widgets."""
        with TabbedContent():
            with TabPane("Curves", id="curves"), Horizontal():
                yield OptionList(id="metrics")
                with Vertical():
                    yield PlotextPlot(id="plot")
                    yield Static(id="alerts")
            with TabPane("Trajectories", id="trajectories"):
                if len(self._runs) > 1:
                    runs = [(run.name, number) for number, run in enumerate(self._runs)]
                    yield Select(runs, value=0, allow_blank=False, id="run")
                yield Input(placeholder='reward<0.5 tool=python text~"not found"', id="filter")
                yield Static(id="said")
                yield DataTable(cursor_type="row", id="table")
        yield Footer()

    def on_mount(self) -> None:
        """Shows what is there, and keeps it up to date."""
        self._main.query_one(DataTable).add_columns(*(_HEADS.get(name, name) for name in _COLUMNS))
        self.action_reload()
        self.set_interval(_RELOAD_S, self._reload_if_idle)

    def close(self) -> None:
        """Closes the databases, after the app has ended: until then a thread may query them."""
        for run in self._runs:
            run.trajectories.close()

    def _reload_if_idle(self) -> None:
        """Reads the runs again, unless a thread still does: a large run may take longer."""
        if not any(worker.is_running for worker in self.workers):
            self.action_reload()

    def action_reload(self) -> None:
        """Reads the runs again."""
        self._read_metrics()
        self._query_trajectories()

    def action_filter(self) -> None:
        """Leads to the line of the filter."""
        self._main.query_one(TabbedContent).active = "trajectories"
        self._main.query_one("#filter", Input).focus()

    def action_page(self, by: int) -> None:
        """Shows the next or the previous page of the table."""
        last = max(0, self._num_found - 1) // _PAGE
        self._page = min(max(0, self._page + by), last)
        self._query_trajectories()

    @on(OptionList.OptionHighlighted, "#metrics")
    def _choose_metric(self, event: OptionList.OptionHighlighted) -> None:
        if event.option.id is not None:
            self._metric = event.option.id
            self._draw()

    @on(Input.Submitted, "#filter")
    def _set_filter(self, event: Input.Submitted) -> None:
        try:
            self._filter = Filter.parse(event.value)
        except FilterError as error:
            # Kept, or the next reload would take it away before it is read.
            self._filter_error = str(error)
            self._say(self._filter_error)
            return
        self._filter_error = ""
        self._page = 0
        self._query_trajectories()
        self._main.query_one(DataTable).focus()

    @on(Select.Changed, "#run")
    def _set_run(self) -> None:
        self._page = 0
        self._query_trajectories()

    @on(DataTable.RowSelected, "#table")
    def _open(self, event: DataTable.RowSelected) -> None:
        # Not by its place: the table may have been filled again since the key was pressed.
        _, *key = json.loads(str(event.row_key.value))
        self._read_one(*key)

    @work(thread=True, exclusive=True, group="metrics")
    def _read_metrics(self) -> None:
        for run in self._runs:
            run.reload()
        self._show_from_thread(self._show_metrics)

    @work(thread=True, exclusive=True, group="trajectories")
    def _query_trajectories(self) -> None:
        where, page, files = self._filter, self._page, self._chosen.trajectories
        found = files.count(where)
        rows = files.query(where, _COLUMNS, order_by=("-step",), limit=_PAGE, offset=page * _PAGE)
        if (where, page, files) == (self._filter, self._page, self._chosen.trajectories):
            self._show_from_thread(self._show_trajectories, found, rows, files.damaged)

    @work(thread=True, exclusive=True, group="one")
    def _read_one(self, step: int, phase: str, task_id: str, rollout_index: int) -> None:
        trajectory = self._chosen.trajectories.one(step, phase, task_id, rollout_index)
        if trajectory is None:
            gone = f"the file of {inert(task_id)} in step {step} is gone or damaged"
            self._show_from_thread(self.notify, gone, severity="warning", markup=False)
        else:
            self._show_from_thread(self.push_screen, ConversationScreen(trajectory))

    def _show_from_thread(self, show: Callable[..., object], *args: Any, **options: Any) -> None:
        def unless_ended() -> object:
            return show(*args, **options) if self.is_running else None

        self.call_from_thread(unless_ended)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leaves the keys of the table out while a trajectory is shown."""
        return action not in ("filter", "page") or self.screen is self._main

    @property
    def _main(self) -> Screen[object]:
        """The screen with curves and table, which stays below that of a trajectory."""
        return self.screen_stack[0]

    @property
    def _chosen(self) -> _Run:
        return self._runs[self._main.query_one("#run", Select).value if len(self._runs) > 1 else 0]  # type: ignore[index]

    def _show_metrics(self) -> None:
        names = sorted({name for run in self._runs for name in run.curves.steps})
        options = self._main.query_one("#metrics", OptionList)
        if names != [option.id for option in options.options]:
            metric = self._metric
            options.set_options([Option(Text(inert(name)), id=name) for name in names])
            if metric in names:
                options.highlighted = names.index(metric)
                self.call_after_refresh(options.scroll_to_highlight)
        alerts = [
            Text(inert(f"{run.name}, step {line['step']}: {line.get('text')}"))
            for run in self._runs
            for line in run.alerts.lines[-3:]
        ]
        self._main.query_one("#alerts", Static).update(Text("\n").join(alerts))
        self._draw()

    def _draw(self) -> None:
        plot = self._main.query_one(PlotextPlot)
        plot.plt.clear_data()
        plot.plt.title(inert(self._metric))
        plot.plt.xlabel("step")
        for run in self._runs:
            steps = run.curves.steps.get(self._metric)
            if steps:
                label = run.name if len(self._runs) > 1 else None
                plot.plt.plot(steps, run.curves.values[self._metric], label=label, marker="braille")
        plot.refresh()

    def _show_trajectories(
        self, found: int, rows: list[dict[str, Any]], damaged: dict[str, str]
    ) -> None:
        table = self._main.query_one(DataTable)
        cursor = table.cursor_row
        self._num_found = found
        table.clear()
        for place, row in enumerate(rows):  # a key that occurs twice would be an error
            key = json.dumps([place, *(row[name] for name in _IDENTITY)])
            table.add_row(*(_cell(row[name]) for name in _COLUMNS), key=key)
        table.move_cursor(row=min(cursor, max(0, len(rows) - 1)))
        first = self._page * _PAGE
        said = f"{first + 1:,} to {first + len(rows):,} of {found:,}" if rows else "none"
        left_out = f"; left out: {', '.join(map(inert, sorted(damaged)))}" if damaged else ""
        self._say(self._filter_error or f"{said}{left_out}")

    def _say(self, text: str) -> None:
        self._main.query_one("#said", Static).update(Text(inert(text)))


def _cell(value: object) -> Text:
    if value is None:
        return Text("-", justify="right")
    if isinstance(value, float):
        return Text(f"{value:.4g}", justify="right")
    if isinstance(value, int):
        return Text(str(value), justify="right")
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return Text(inert(" ".join(text.split()))[:_WIDEST])


def run(run_dirs: Sequence[Path]) -> None:
    """Shows run directories in the terminal until the user quits.

    Args:
        run_dirs: At least one; several compare their curves.

    Raises:
        NotARunError: A directory is none of a run.
    """
    app = RunApp(run_dirs)
    try:
        app.run()
    finally:
        app.close()
