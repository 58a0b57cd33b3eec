import io

import pytest
from rich.console import Console

from treadle.trainer.report import Progress, open_progress
from treadle.trainer.report.terminal.progress import LiveProgress, PlainProgress, step_line

STEP = {
    "reward/mean": 0.75,
    "tool/call_rate": 0.625,
    "tokens/sampled": 3000.0,
    "time/rollout_s": 2.0,
    "time/step_s": 3.25,
}


def run_two_steps(progress: Progress) -> None:
    with progress:
        progress.note("8 rows [left] out")
        progress.step_done(0, {"val/reward": 0.5})
        for step in (1, 2):
            with progress.phase("rollout", total=2):
                progress.advance()
                progress.advance()
            with progress.phase("train"):
                pass
            progress.step_done(step, STEP)


def test_without_a_terminal_there_is_a_line_per_step_and_note() -> None:
    out = io.StringIO()
    progress = open_progress(total_steps=2, console=Console(file=out))
    assert isinstance(progress, PlainProgress)
    run_two_steps(progress)
    note, zero, first, second = out.getvalue().splitlines()
    assert note == "8 rows [left] out"
    assert zero == "step 0/2  held-out reward 0.500"
    assert first == (
        "step 1/2  reward 0.750  tool rate 62%  1,500 tok/s  3.2 s  "
        "(about 3.2 s left, 3.2 s a step)"
    )
    assert second == "step 2/2  reward 0.750  tool rate 62%  1,500 tok/s  3.2 s"


def test_without_steps_there_is_a_line_per_tenth_of_a_phase() -> None:
    out = io.StringIO()
    with open_progress(total_steps=None, console=Console(file=out)) as progress:
        with progress.phase("start"):
            pass
        with progress.phase("evaluate", total=25):
            for _ in range(25):
                progress.advance()
    first, *_, last = lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert (first, last) == ("evaluate 3/25", "evaluate 25/25")


def test_lines_are_flushed_at_once() -> None:
    class Counting(io.StringIO):
        flushed = 0

        def flush(self) -> None:
            self.flushed += 1

    out = Counting()
    PlainProgress(total_steps=1, stream=out).note("hello")
    assert out.flushed == 1


def test_a_reader_that_has_gone_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    run_two_steps(PlainProgress(total_steps=2, stream=Gone()))


def test_on_a_terminal_bars_are_drawn_and_notes_stay() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    progress = open_progress(total_steps=2, console=console)
    assert isinstance(progress, LiveProgress)
    run_two_steps(progress)
    shown = out.getvalue()
    assert "8 rows [left] out" in shown
    assert "step 0/2  held-out reward 0.500" in shown
    assert "reward 0.750" in shown
    assert "training" in shown


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, _environ={"TERM": "xterm"})
    with (
        pytest.raises(RuntimeError, match="server lost"),
        open_progress(total_steps=2, console=console) as progress,
        progress.phase("rollout", total=3),
    ):
        raise RuntimeError("server lost")
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert out.getvalue().count(hide) == out.getvalue().count(show) == 1


def test_a_step_line_shows_only_what_was_measured() -> None:
    assert step_line(7, 100, {"reward/mean": float("nan")}) == "step   7/100"


def test_a_rate_beside_training_is_of_the_whole_step() -> None:
    values = {"tokens/sampled": 100.0, "time/rollout_s": 0.1, "time/step_s": 2.0}
    assert "1,000 tok/s" in step_line(7, 100, values)
    assert "50 tok/s" in step_line(7, 100, values | {"staleness/mean": 1.0})
