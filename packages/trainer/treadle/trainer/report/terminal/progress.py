"""The progress display: the current activity of the run, live on a terminal, else line by line.

Invariant: it decides nothing and never fails a run. The driver calls it in this order:

    with open_progress(total_steps=60) as progress:
        progress.note("8 of 7473 train prompts left out")
        for step in ...:
            with progress.phase("rollout", total=64):
                progress.advance()                      # per finished trajectory
            with progress.phase("train"): ...
            progress.step_done(step, metrics)           # the line of the metrics log

On a terminal the rich library redraws from its own thread, so the run never waits for it;
everything else gets one line per step, per note and per validation, flushed at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, TYPE_CHECKING, Protocol, Self

from treadle.tracing.inert import inert
from treadle.trainer.report.metrics import (
    REWARD,
    ROLLOUT_S,
    SAMPLED_TOKENS,
    SIGNAL,
    STALENESS,
    STEP_S,
    TOOL_RATE,
    TRAIN_LOSS,
    VAL_ACCURACY,
    VAL_LOSS,
    VAL_REWARD,
    VAL_TOOL_RATE,
    Record,
)
from treadle.trainer.report.pace import Expected, Pace
from treadle.trainer.report.summary import format_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


class Progress(Protocol):
    """The display, between `with open_progress(...)` and its end."""

    def note(self, text: str) -> None:
        """Shows one line that stays: what was found at start, a server restarted, a checkpoint."""
        ...

    def phase(self, name: str, *, total: int | None = None) -> AbstractContextManager[None]:
        """Starts the phase `name`; `total` is the number of `advance` calls to expect."""
        ...

    def advance(self, count: int = 1) -> None:
        """`count` more parts of the current phase are done."""
        ...

    def step_done(self, step: int, values: Record) -> None:
        """Step `step` has ended with these metrics; step 0 is the validation before training."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...


def open_progress(
    *,
    total_steps: int | None,
    first_step: int = 1,
    pace: Pace | None = None,
    console: Console | None = None,
) -> Progress:
    """Returns the display for where the output goes: live on a terminal, plain lines anywhere else.

    Args:
        total_steps: The last step of the run. None: an evaluation, which has phases only.
        first_step: The first step of this process: greater than 1 after a resume.
        pace: Says what is to come. None: one of a run that neither validates nor saves.
        console: Where to show it. None: standard output.
    """
    from rich.console import Console

    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(
            total_steps=total_steps, first_step=first_step, pace=pace, console=console
        )
    return PlainProgress(total_steps=total_steps, pace=pace, stream=console.file)


def step_line(step: int, total_steps: int, values: Record) -> str:
    """Returns what a step gave, in one line: only what its metrics hold."""
    width = len(str(total_steps))
    parts = [f"step {step:>{width}}/{total_steps}"]
    for label, name, text in (
        ("loss", TRAIN_LOSS, "{:.4f}"),
        ("held-out loss", VAL_LOSS, "{:.4f}"),
        ("reward", REWARD, "{:.3f}"),
        ("signal", SIGNAL, "{:.0%}"),
        ("tool rate", TOOL_RATE, "{:.0%}"),
        ("held-out reward", VAL_REWARD, "{:.3f}"),
        ("held-out accuracy", VAL_ACCURACY, "{:.1%}"),
        ("held-out tool rate", VAL_TOOL_RATE, "{:.0%}"),
    ):
        value = values.get(name, math.nan)
        if math.isfinite(value):
            parts.append(f"{label} {text.format(value)}")
    sampling = STEP_S if STALENESS in values else ROLLOUT_S
    tokens, sampling_s = values.get(SAMPLED_TOKENS, math.nan), values.get(sampling, math.nan)
    if math.isfinite(tokens) and sampling_s > 0:
        parts.append(f"{tokens / sampling_s:,.0f} tok/s")
    if math.isfinite(seconds := values.get(STEP_S, math.nan)):
        parts.append(format_seconds(seconds))
    return "  ".join(parts)


def _left(expected: Expected | None) -> str:
    """Returns what is to come, for people; nothing before the first step and after the last."""
    if expected is None or not expected.left_s:
        return ""
    step, left = map(format_seconds, (expected.step_s, expected.left_s))
    return f"about {left} left, {step} a step"


class PlainProgress:
    """One line per note and per step; without steps, one per tenth of a phase."""

    def __init__(
        self, *, total_steps: int | None, pace: Pace | None = None, stream: IO[str]
    ) -> None:
        self._total = total_steps or 0
        self._stream = stream
        self._pace = pace or Pace(total_steps=self._total)
        self._shows_phases = total_steps is None
        self._phase = ("", 0, 0)  # its name, its parts and how many are done

    def note(self, text: str) -> None:
        """Writes the line."""
        self._write(text)

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[None]:
        """Begins the phase; its name alone is not shown."""
        self._phase = (name, total or 0, 0)
        yield

    def advance(self, count: int = 1) -> None:
        """Writes a line when another tenth of the phase is done, where there are no steps."""
        name, total, before = self._phase
        done = before + count
        self._phase = (name, total, done)
        if self._shows_phases and total and done * 10 // total > before * 10 // total:
            self._write(f"{name} {done}/{total}")

    def step_done(self, step: int, values: Record) -> None:
        """Writes the line of the step, with the time that is left."""
        left = _left(self._pace.step_done(step, values))
        line = step_line(step, self._total, values)
        self._write(f"{line}  ({left})" if left else line)

    def _write(self, text: str) -> None:
        with suppress(OSError):  # the reader of the output is gone; the run continues
            self._stream.write(inert(text) + "\n")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class LiveProgress:
    """A bar for the run, one for the phase, and the last step's numbers, redrawn in place."""

    def __init__(
        self,
        *,
        total_steps: int | None,
        first_step: int = 1,
        pace: Pace | None = None,
        console: Console,
    ) -> None:
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = console
        self._total = total_steps or 0
        self._pace = pace or Pace(total_steps=self._total)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=36),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[more]}"),
            console=console,
        )
        self._run = self._bars.add_task(
            "training",
            total=total_steps,
            completed=first_step - 1,
            visible=total_steps is not None,
            more="",
        )
        self._phase = self._bars.add_task("starting", total=None, more="")
        self._last = ""
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=8)

    def note(self, text: str) -> None:
        """Prints the line above the bars."""
        self._console.print(inert(text), markup=False, highlight=False)

    @contextmanager
    def phase(self, name: str, *, total: int | None = None) -> Iterator[None]:
        """Shows the phase with its own bar, until the next phase begins."""
        self._bars.remove_task(self._phase)
        self._phase = self._bars.add_task(name, total=total, more="")
        yield

    def advance(self, count: int = 1) -> None:
        """Moves the bar of the phase."""
        self._bars.advance(self._phase, count)

    def step_done(self, step: int, values: Record) -> None:
        """Moves the bar of the run; a step that validated leaves its line behind."""
        left = _left(self._pace.step_done(step, values))
        self._bars.update(self._run, completed=step, more=left)
        self._last = step_line(step, self._total, values)
        if VAL_REWARD in values or VAL_LOSS in values:
            self.note(self._last)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        return Group(self._bars, Text(self._last, style="dim", no_wrap=True, overflow="ellipsis"))

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bars.remove_task(self._phase)
        self._live.stop()
