"""Draws the picture in an example's README from a run: sampled and held-out reward over the steps.

    python examples/draw_curve.py runs/math_expression docs/math_expression_curve.png

Points are steps, the line is their running mean; validations are circles. The picture is small, for
a README; `report.html` in the run directory has all curves.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.report.metrics import REWARD, STEP, VAL_REWARD, Record, read_metrics
from treadle.trainer.report.page.curves import running_mean

__all__ = ["draw", "main"]

_WINDOW = 5


def draw(records: Sequence[Record], path: Path) -> None:
    """Writes the picture of a run's metrics.

    Raises:
        OSError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.8), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [record[STEP] for record in records if REWARD in record]
    rewards = [record[REWARD] for record in records if REWARD in record]
    axes.plot(steps, rewards, ".", color="#9fb3c8", label="reward of a step")
    axes.plot(steps, running_mean(rewards, _WINDOW), color="#2f6f9f", label="its running mean")
    held_out = [record for record in records if VAL_REWARD in record]
    axes.plot(
        [record[STEP] for record in held_out],
        [record[VAL_REWARD] for record in held_out],
        "o-",
        color="#b5541c",
        label="held-out rows",
    )
    axes.set_xlabel("step")
    axes.set_ylim(bottom=min(0.0, *rewards))
    axes.grid(color="#e4e7eb")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, format="png")


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the run directory and the name of the picture from the command line."""
    parser = argparse.ArgumentParser(description="Draws the rewards of a run as a small picture.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    args = parser.parse_args(arguments)
    draw(read_metrics(args.run / "metrics.jsonl"), args.picture)


if __name__ == "__main__":
    main()
