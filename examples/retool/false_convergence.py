"""Shows how ReTool's reward is gamed, and what its two remedies do: three tiny runs and a picture.

    python examples/retool/false_convergence.py --model runs/retool-sft --directory RUNS \
        --write examples/retool/false_convergence.png

Each run trains the tiny model on products that it cannot compute, with one mode of the reward
`retool`. Where no answer is right, all that a group's rewards tell apart is the number of turns.
Dynamic sampling is off, as in verl's command for ReTool: it would replace these groups.

A run that the directory holds already is not made again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["MODES", "arguments_of", "draw", "main"]

MODES: Final = ("shaped", "flat", "capped")
"""Of the reward: verl's, and the two remedies."""

_HERE: Final = Path(__file__).parent
_METRICS: Final = {
    "reward/mean": "reward",
    "reward/accuracy": "right answers",
    "reward/wrong_with_many_turns": "wrong after 12 turns or more",
}

Curves = Mapping[str, Sequence[Mapping[str, float]]]
"""The metrics of each step, by the reward's mode."""


def arguments_of(mode: str, *, model: Path, data: Path, run: Path, steps: int) -> list[str]:
    """Returns the trainer's arguments of one run."""
    return [
        f"--config={_HERE / 'tiny.yaml'}",
        f"model.path={model}",
        f"data.train_files={data}",
        "data.val_files=[]",
        f"reward.mode={mode}",
        "reward.overlong_penalty=0",
        "policy.optimizer.lr=3.0e-4",
        "algorithm.dynamic_sampling=null",
        "schedule.val_every=null",
        f"schedule.total_steps={steps}",
        f"run.dir={run}",
    ]


def _train(run: Path, arguments: Sequence[str], steps: int) -> Sequence[Mapping[str, float]]:
    """Makes a run, or what is left of it, and returns the metrics of its steps.

    Raises:
        SystemExit: It failed; its output is printed.
    """
    metrics = run / "metrics.jsonl"
    if not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        command = [sys.executable, "-m", "treadle.trainer.main", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["step"] > 0]


def draw(curves: Curves, path: Path) -> None:
    """Draws reward, right answers and long wrong trajectories of all runs."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(_METRICS), figsize=(11, 3.2))
    for axis, (metric, title) in zip(axes, _METRICS.items(), strict=True):
        for mode, steps in curves.items():
            axis.plot([s["step"] for s in steps], [s[metric] for s in steps], label=mode)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim((-1.03, 0.03) if metric == "reward/mean" else (-0.03, 1.03))
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(title="reward.mode")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=90)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the runs that are missing, prints a line for each, and draws the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="the run of tiny_sft.yaml")
    parser.add_argument("--data", type=Path, default=_HERE / "data" / "hard.jsonl")
    parser.add_argument("--directory", type=Path, required=True, help="of the runs")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--write", type=Path, required=True, help="the picture")
    given = parser.parse_args(argv)
    curves = {}
    for mode in MODES:
        run = given.directory / mode
        arguments = arguments_of(
            mode, model=given.model, data=given.data, run=run, steps=given.steps
        )
        curves[mode] = _train(run, arguments, given.steps)
        first, last = curves[mode][0], curves[mode][-1]
        shown = (f"{name} {first[m]:.2f} -> {last[m]:.2f}" for m, name in _METRICS.items())
        sys.stdout.write(f"{mode}: {', '.join(shown)}\n")
    draw(curves, given.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
