"""Trajectories per hour of the schedules, with tools that have a long tail; and what they learn.

Whole runs: driver, policy rank, two servers, gRPC and weight updates are real. The servers run the
fake engine with a cost per token; a tool takes log-normal seconds, median 1 and 99th percentile 30;
an update takes the time that `--train_s` says, in which its process sleeps, as the driver of a GPU
does. All of these times are multiplied by `schedules_subject.SCALE`, and the figures are not::

    ./pants run benchmarks/schedules.py -- --minutes 14

The schedules run in turns, round after round, until the next round would end after `--minutes`; a
round has its own seed, and compares schedules within itself only, so that a machine that becomes
slower slows all of them. The first step of a run is left out: it warms up, and in it the other
schedules fill their queue. The last steps are not, though they wait for the stragglers. Beside the
rate stands how long the policy waited for groups.

With `--reward` the schedules train the calculator demo instead, with its torch engine, and the
final rewards are compared, seed by seed::

    ./pants run benchmarks/schedules.py -- --reward --minutes 14
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_matrix import Case, read_curve, train
from schedules_subject import MEDIAN_S, P99_S, SCALE, TOKENS, TURNS

from treadle.trainer.demo import DEMO
from treadle.trainer.launch.process import child_python_path

PROMPTS, SAMPLES = 8, 4
KINDS: Mapping[str, tuple[str, ...]] = {
    "sync": (),
    "overlap": (),
    "stream": ("schedule.surplus=1",),
    "async": ("schedule.max_staleness=2",),
}
DEFAULT_KINDS = ("sync", "stream", "async")
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of values -> 97.5 % quantile of Student's distribution for the interval of their mean."""
SUBJECT = Path(__file__).with_name("schedules_subject.py")


@dataclass(frozen=True)
class Measured:
    """One run.

    Attributes:
        step_s: Mean seconds of a step.
        wait_s: Of them, those in which the policy waited for groups.
        staleness: Mean over the groups.
    """

    step_s: float
    wait_s: float
    staleness: float

    @property
    def per_hour(self) -> float:
        """Trajectories, at the subject's own speed."""
        return 3600 * PROMPTS * SAMPLES / self.step_s * SCALE


def rows_of_the_demo() -> Iterator[Mapping[str, Any]]:
    """Yields the demo's rows without the loop that they name, so that they get the subject's."""
    for line in DEMO.with_name("train.jsonl").read_text().splitlines():
        yield {name: value for name, value in json.loads(line).items() if name != "agent_name"}


def run(kind: str, *, seed: int, steps: int, train_s: float, decode_s: float) -> Measured:
    """Trains with one schedule and reads its metrics."""
    # The trainer passes no import path to a command.
    server = ["env", f"PYTHONPATH={child_python_path()}", sys.executable]
    server += ["-m", "treadle.rollout_server"]
    server += ["--fake.decode_s_per_token", str(decode_s * SCALE)]
    with tempfile.TemporaryDirectory() as name:
        rows = Path(name) / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of_the_demo()))
        arguments = (
            f"run.dir={name}/run",
            f"data.train_files={rows}",
            "data.val_files=[]",
            f"run.seed={seed}",
            f"schedule.kind={kind}",
            *KINDS[kind],
            f"schedule.total_steps={steps}",
            "schedule.val_every=null",
            "schedule.val_before_train=false",
            "schedule.save_every=null",
            "schedule.save_last=false",
            "run.trajectories_max_bytes=0",
            f"data.prompts_per_step={PROMPTS}",
            f"rollout.samples_per_prompt={SAMPLES}",
            "rollout.name=fake",
            "rollout.num_replicas=2",
            f"rollout.server_command={json.dumps(server)}",
            "sync.in_flight=interrupt",
            f"agent.loops.long_tail={SUBJECT}:LongTail",
            "agent.default_loop=long_tail",
            f"algorithm.loss={SUBJECT}:costly",
            f"algorithm.loss_args.seconds={train_s * SCALE}",
            "algorithm.old_logprobs=rollout",
            "policy.micro_batch_tokens=65536",
        )
        done = subprocess.run(
            [sys.executable, "-m", "treadle.trainer.main", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stdout}{done.stderr}")
        text = (Path(name) / "run" / "metrics.jsonl").read_text()
    lines: list[Mapping[str, Any]] = [json.loads(line) for line in text.splitlines()][1:]
    if any(line["agent_loop/assistant_turns"] != TURNS for line in lines):
        raise SystemExit(f"{kind}: rows did not run the subject's loop")
    return Measured(
        step_s=statistics.fmean(line["time/step_s"] for line in lines),
        wait_s=statistics.fmean(line["time/rollout_s"] for line in lines),
        staleness=statistics.fmean(line.get("staleness/mean", 0.0) for line in lines),
    )


def reward(kind: str, *, seed: int, steps: int, directory: Path) -> Mapping[str, float]:
    """Trains the demo with one schedule; returns what it ended with."""
    stale = ("sync.in_flight=interrupt", "algorithm.correction.weights=token")
    case = Case(
        kind="schedule",
        name=kind,
        arguments=(
            f"schedule.kind={kind}",
            *KINDS[kind],
            *(stale if kind != "sync" else ()),
            f"schedule.total_steps={steps}",
            f"schedule.val_every={steps}",
            "schedule.save_every=null",
            "schedule.save_last=false",
            "run.trajectories_max_bytes=0",
        ),
    )
    train(case, seed, steps, directory)
    curve = read_curve(directory / f"{case.key}-{seed}")
    return {
        "held-out accuracy": curve.accuracy[-1],
        "sampled reward, last ten steps": statistics.fmean(curve.rewards[-10:]),
    }


def interval(values: Sequence[float]) -> str:
    """Returns the mean with its 95 % interval, of up to five values."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:+.3f}"
    half = _T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def rounds(most: int, minutes: float) -> Iterator[int]:
    """Yields the numbers of rounds, while the next one is likely to end in time."""
    began = time.monotonic()
    for number in range(most):
        yield number
        passed = time.monotonic() - began
        if passed + passed / (number + 1) > 60 * minutes:
            return


def compare_rewards(given: argparse.Namespace) -> None:
    """Trains the demo, and prints for each schedule what it learned and its difference to sync."""
    found: dict[str, list[Mapping[str, float]]] = {kind: [] for kind in given.kinds}
    with tempfile.TemporaryDirectory() as name:
        for seed in rounds(min(given.rounds, max(_T_95)), given.minutes):
            for kind in given.kinds:
                got = reward(kind, seed=seed, steps=given.steps, directory=Path(name))
                found[kind].append(got)
                shown = ", ".join(f"{what} {value:.3f}" for what, value in got.items())
                print(f"  seed {seed} {kind:<8} {shown}", flush=True)
    for kind, ends in found.items():
        for what in ends[0]:
            values = [end[what] for end in ends]
            line = f"{kind:<8} {what}: {interval(values)[1:]}"
            if kind != "sync" and "sync" in found:
                pairs = zip(values, (end[what] for end in found["sync"]), strict=True)
                line += f"; less sync, seed by seed: {interval([a - b for a, b in pairs])}"
            print(line)


def main() -> None:
    """Runs the schedules in turns, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reward", action="store_true", help="compare what the demo learns")
    parser.add_argument("--rounds", type=int, default=3, help="at most; with --reward the seeds")
    parser.add_argument("--minutes", type=float, default=14.0, help="that all rounds may take")
    parser.add_argument("--steps", type=int, help="of a run; 7, with --reward 40")
    parser.add_argument("--train_s", type=float, default=20.0, help="seconds of an update")
    parser.add_argument("--decode_s", type=float, default=0.1, help="seconds of a token")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(DEFAULT_KINDS))
    given = parser.parse_args()
    given.steps = given.steps or (40 if given.reward else 7)
    if given.reward:
        compare_rewards(given)
        return
    print(
        f"{PROMPTS} rows x {SAMPLES}, {TURNS} completions of at most {TOKENS} tokens at "
        f"{given.decode_s:g} s, {TURNS - 1} tools (median {MEDIAN_S:g} s, p99 {P99_S:g} s), update "
        f"{given.train_s:g} s; times multiplied by {SCALE:g}"
    )
    runs: dict[str, list[Measured]] = {kind: [] for kind in given.kinds}
    for seed in rounds(given.rounds, given.minutes):
        for kind in given.kinds:
            measured = run(
                kind,
                seed=seed,
                steps=given.steps,
                train_s=given.train_s,
                decode_s=given.decode_s,
            )
            runs[kind].append(measured)
            print(
                f"  round {seed + 1} {kind:<8} {measured.per_hour:6,.0f} trajectories/h", flush=True
            )
    base = runs.get("sync")
    for kind, measured_runs in runs.items():
        rates = [measured.per_hour for measured in measured_runs]
        waits = statistics.fmean(m.wait_s / m.step_s for m in measured_runs)
        line = (
            f"{kind:<8} {statistics.median(rates):6,.0f} trajectories/h "
            f"({min(rates):,.0f} to {max(rates):,.0f}), the policy waits {waits:.0%}, staleness "
            f"{statistics.fmean(m.staleness for m in measured_runs):.2f}"
        )
        if base is not None and kind != "sync":
            ratios = [m.per_hour / b.per_hour for m, b in zip(measured_runs, base, strict=True)]
            line += (
                f"; {statistics.median(ratios):.2f} times sync "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        print(line)


if __name__ == "__main__":
    main()
