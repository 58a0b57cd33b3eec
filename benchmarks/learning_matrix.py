"""Trains the calculator demo with each advantage and each loss, over several seeds.

    python benchmarks/learning_matrix.py --directory RUNS [--seeds 0 1 2] [--steps 40]
        [--cases PATTERN ...] [--finished] [--write docs]

Each run is a separate process, `treadle.trainer.main` with the arguments of its case, one after
another. A run that the directory holds already is not made again, so that the matrix can be made in
several sittings; with `--finished` none is made. `--write` puts one table and one picture of the
finished runs there, `results.md` (between its two marks) and `results.png`.

The advantages are compared with one update per step, as the demo has it. The losses are compared
with four, since with one they are all the policy gradient: nothing is clipped while the policy is
the one that sampled.
"""

import argparse
import fnmatch
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

BEGIN, END = "<!-- learning_matrix.py: begin -->", "<!-- end -->"
_FOUR_UPDATES = ("algorithm.mini_batches=4",)

ADVANTAGES: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "gae": ("critic.optimizer.lr=3e-4",),  # as docs/critic.md has it for the demo
    "dr_grpo": (),
    "rloo": (),
    "reinforce_plus_plus": (),
    "reinforce_plus_plus_baseline": (),
    "remax": (),
    "opo": (),
    "grpo_passk": (),
    "gpg": (),
    "maxrl": (),
}
"""The advantages of docs/algorithms.md, each with the default loss."""

# Clipping by samples needs narrower bounds than clipping by tokens: those of the papers.
LOSSES: Mapping[str, Sequence[str]] = {
    "ppo": (),
    "policy_gradient": (),
    "gspo": ("algorithm.clip_low=3e-4", "algorithm.clip_high=4e-4"),
    "gmpo": ("algorithm.clip_low=0.4", "algorithm.clip_high=0.4"),
    "cispo": (),
    "clip_cov": (),
    "kl_cov": (),
    "dppo_tv": (),
    "dppo_kl": (),
    "distillation": ("algorithm.reference_path={runs}/advantage-grpo-0",),
}
"""The losses of docs/losses.md, each with grpo. Distillation reads no reward but a teacher: the
model that the first seed of advantage-grpo ended with, which must be there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table.

    Attributes:
        kind: advantage or loss.
        name: As in the configuration.
        arguments: Of the trainer, besides the seed; `{runs}` stands for the folder of the runs.
    """

    kind: str
    name: str
    arguments: Sequence[str]

    @property
    def key(self) -> str:
        """Names the case and its directories."""
        return f"{self.kind}-{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What one run learned.

    Attributes:
        steps: Those that were validated, the first of them 0.
        accuracy: On the held-out problems, after each of them.
        calls: Share of the held-out problems for which the model called the tool.
        rewards: Mean over the sampled trajectories of each step, from step 1.
    """

    steps: Sequence[int]
    accuracy: Sequence[float]
    calls: Sequence[float]
    rewards: Sequence[float]

    def steps_to(self, accuracy: float) -> int | None:
        """Returns the first validated step with at least this accuracy."""
        return next(
            (
                step
                for step, value in zip(self.steps, self.accuracy, strict=True)
                if value >= accuracy
            ),
            None,
        )


def cases(patterns: Sequence[str]) -> list[Case]:
    """Returns the cases whose key matches one of the shell patterns."""
    every = [
        *(
            Case(kind="advantage", name=n, arguments=(f"algorithm.advantage={n}", *a))
            for n, a in ADVANTAGES.items()
        ),
        *(
            Case(kind="loss", name=n, arguments=(f"algorithm.loss={n}", *_FOUR_UPDATES, *a))
            for n, a in LOSSES.items()
        ),
    ]
    return [case for case in every if any(fnmatch.fnmatch(case.key, p) for p in patterns)]


def is_finished(run_dir: Path, steps: int) -> bool:
    """Returns whether a run of this many steps has come to its end."""
    return (run_dir / "report.html").exists() and _lines(run_dir)[-1]["step"] == steps


def train(case: Case, seed: int, steps: int, directory: Path) -> None:
    """Makes one run, or what is left of it.

    Raises:
        SystemExit: It failed; its output is printed.
    """
    run_dir = directory / f"{case.key}-{seed}"
    command = [
        *(sys.executable, "-m", "treadle.trainer.main", f"run.dir={run_dir}", f"run.seed={seed}"),
        *(f"schedule.total_steps={steps}", "schedule.val_every=5", f"schedule.save_every={steps}"),
        *(argument.format(runs=directory) for argument in case.arguments),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def read_curve(run_dir: Path) -> Curve:
    """Reads what a finished run learned."""
    lines = _lines(run_dir)
    validated = [line for line in lines if "val/accuracy" in line]
    return Curve(
        steps=[int(line["step"]) for line in validated],
        accuracy=[line["val/accuracy"] for line in validated],
        calls=[line["val/tool_call_rate"] for line in validated],
        rewards=[line["reward/mean"] for line in lines if line["step"] > 0],
    )


def _lines(run_dir: Path) -> list[dict[str, float]]:
    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def table(found: Mapping[Case, Sequence[Curve]], *, kind: str) -> str:
    """Returns the rows of one kind in Markdown: medians over the seeds, with their range."""
    rows = [
        f"| `algorithm.{kind}` | seeds | accuracy at the end | calls at the end | step with 90 % "
        "| sampled reward, last five steps |",
        "|---|---|---|---|---|---|",
    ]
    for case, curves in found.items():
        if case.kind != kind:
            continue
        reached = [curve.steps_to(0.9) for curve in curves]
        known = [step for step in reached if step is not None]
        when = _spread(known, "{:.0f}") if len(known) == len(reached) else "not all reached it"
        rows.append(
            f"| `{case.name}` | {len(curves)} "
            f"| {_spread([100 * curve.accuracy[-1] for curve in curves], '{:.0f} %')} "
            f"| {_spread([100 * curve.calls[-1] for curve in curves], '{:.0f} %')} "
            f"| {when if known else 'none'} "
            f"| {_spread([mean(curve.rewards[-5:]) for curve in curves], '{:.2f}')} |"
        )
    return "\n".join(rows)


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = (form.format(each) for each in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def draw(found: Mapping[Case, Sequence[Curve]], path: Path) -> None:
    """Draws accuracy and sampled reward of each case: median of the seeds, and their range."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = 5
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(12, 2 * rows + 0.6), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis in axes.flat[max(0, len(found) - columns) : len(found)]:
        axis.tick_params(labelbottom=True)  # the last of its column
    for axis, (case, curves) in zip(axes.flat, found.items(), strict=False):
        trained = range(1, len(curves[0].rewards) + 1)
        for label, steps, values in (
            ("accuracy on held-out problems", curves[0].steps, [c.accuracy for c in curves]),
            ("reward of sampled trajectories", trained, [c.rewards for c in curves]),
        ):
            by_step = list(zip(*values, strict=True))
            low, high = [min(v) for v in by_step], [max(v) for v in by_step]
            axis.fill_between(steps, low, high, alpha=0.25)
            axis.plot(steps, [median(v) for v in by_step], label=label)
        axis.set_title(f"{case.kind}: {case.name}", fontsize=8)
        axis.grid(visible=True, alpha=0.3)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="upper center", ncols=2)
    figure.supxlabel("step", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path, format="png", dpi=90)
    plt.close(figure)


def write(found: Mapping[Case, Sequence[Curve]], directory: Path) -> None:
    """Puts the tables between the marks of `results.md`, and the picture beside it.

    Raises:
        SystemExit: The page has no marks.
    """
    page = directory / "results.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} needs the lines {BEGIN!r} and {END!r}, between which tables go")
    tables = "\n\n".join(table(found, kind=kind) for kind in ("advantage", "loss"))
    page.write_text(f"{before}{BEGIN}\n{tables}\n{END}{after}", encoding="utf-8")
    draw(found, directory / "results.png")


def main() -> None:
    """Makes the runs that are missing, and prints what was learned."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cases", nargs="+", default=["*"], help="patterns, as 'loss-*'")
    parser.add_argument("--finished", action="store_true", help="make no more runs")
    parser.add_argument("--write", type=Path, help="the folder of results.md")
    arguments = parser.parse_args()
    found: dict[Case, list[Curve]] = {}
    # Seed by seed, so that a matrix that is cut short has a seed of every case first.
    for seed in arguments.seeds:
        for case in cases(arguments.cases):
            run_dir = arguments.directory / f"{case.key}-{seed}"
            if not is_finished(run_dir, arguments.steps):
                if arguments.finished:
                    continue
                train(case, seed, arguments.steps, arguments.directory)
            curve = read_curve(run_dir)
            found.setdefault(case, []).append(curve)
            shown = " ".join(f"{100 * value:.0f}" for value in curve.accuracy)
            print(f"{case.key:40} seed {seed}: {shown} %", flush=True)
    if arguments.write is not None:
        write(found, arguments.write)


if __name__ == "__main__":
    main()
