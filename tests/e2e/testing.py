"""Runs the trainer as users do: arguments in; output, exit status and run directory out."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from treadle.rollout_server.testing.descendants import descendants
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.tracing.trajectories import TrajectoryFiles
from treadle.trainer.launch.process import child_python_path

SMALL = (
    "schedule.total_steps=2",
    "schedule.val_every=2",
    "schedule.save_every=null",
    "data.prompts_per_step=4",
    "data.max_val_rows=8",
    "rollout.samples_per_prompt=4",
    "rollout.threads=1",
    "launch.policy_threads=1",
)
"""The demo in a size at which most of a run is the start of its processes."""


class Trainer:
    """A running trainer."""

    def __init__(
        self, run_dir: Path, arguments: Sequence[str], *, command: Sequence[str] = ()
    ) -> None:
        self.run_dir = run_dir
        program = (sys.executable, "-m", "treadle.trainer.main", *command)
        self.process = subprocess.Popen(
            [*program, f"run.dir={run_dir}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": child_python_path()},
        )
        self.lines: list[str] = []

    def read_until(self, words: str) -> str:
        """Reads output until a line contains `words`; returns that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return line
        raise AssertionError(f"the trainer ended without saying {words!r}:\n{self.output}")

    def wait(self) -> int:
        """Waits for the end; returns the exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        return self.process.wait()

    def kill_in_a_step(self, words: str, share: float) -> None:
        """Reads until the end of a step, and kills the run at a place of the next one.

        Call it when the line of the step before was read. The place is measured in the processor
        time of all of the run's processes, so the load of the machine does not move it.

        Args:
            words: A line with these ends the step.
            share: Of what this step took, after which the run is killed in the next one.
        """
        pids = [self.process.pid, *descendants(self.process.pid)]
        began = _processor_s(pids)
        self.read_until(words)
        ended = _processor_s(pids)
        until = ended + share * (ended - began)
        while self.process.poll() is None and _processor_s(pids) < until:
            time.sleep(0.002)
        assert self.process.poll() is None, "it ended before it was killed"
        self.process.kill()
        self.process.wait()

    @property
    def output(self) -> str:
        """The output so far."""
        return "".join(self.lines)

    def metrics(self) -> list[Mapping[str, Any]]:
        """The lines of metrics.jsonl."""
        text = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def curve(self) -> list[tuple[int, float, float]]:
        """Number, mean reward and sampled tokens of each step: what equal runs have in common."""
        names = ("step", "reward/mean", "tokens/sampled")
        return [tuple(line[name] for name in names) for line in self.metrics() if line["step"]]

    def page(self) -> str:
        """The text of report.html."""
        return (self.run_dir / "report.html").read_text(encoding="utf-8")

    def mean(self, name: str, steps: Sequence[int]) -> float:
        """The mean of a metric over steps that all have it."""
        by_step = {line["step"]: line for line in self.metrics()}
        return fmean(by_step[step][name] for step in steps)

    def trajectories(self) -> list[Mapping[str, Any]]:
        """The lines of trajectories.jsonl."""
        text = (self.run_dir / "trajectories.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def pid_of(self, name: str) -> int:
        """Returns the process id of one of the run's servers or ranks."""
        return int(json.loads((self.run_dir / "logs" / f"{name}.ready").read_text())["pid"])


def _processor_s(pids: Sequence[int]) -> float:
    """Returns the processor time that those processes have used which live."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(times[11]) + int(times[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def trained_rows(trainer: Trainer) -> Counter[str]:
    """Returns how many trajectories of each row were trained on."""
    with TrajectoryFiles(trainer.run_dir) as files:
        rows = files.sql(
            "SELECT task_id FROM trajectories WHERE phase = 'train' AND advantage IS NOT NULL"
        )
    return Counter(row["task_id"] for row in rows.to_pylist())


def server_command(engine: str) -> str:
    """Returns the setting that starts servers in the engine's environment, or skips the test."""
    command = engine_command(engine)
    if (path := os.environ.get("PYTHONPATH")) is not None:  # the trainer passes none to the command
        command = ("env", f"PYTHONPATH={path}", *command)
    return f"rollout.server_command={list(command)}"


StartTrainer = Callable[..., Trainer]
