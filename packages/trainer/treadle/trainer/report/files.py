"""Makes the files at the end of a run from those that it wrote while running.

Invariant: everything shown is read back from the run directory, so the report of a run that was
killed, resumed or copied from another machine is made by the same call. Takes seconds; the caller
chooses the thread.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from treadle.trainer.report.curves import draw_curves
from treadle.trainer.report.html import write_html
from treadle.trainer.report.lines import read_lines
from treadle.trainer.report.metrics import read_metrics
from treadle.trainer.report.summary import Summary, summarize

METRICS = "metrics.jsonl"
TRAJECTORIES = "trajectories.jsonl"
CONFIG = "config.json"
CURVES = "curves.png"
REPORT = "report.html"


def write_reports(run_dir: Path, *, title: str) -> Summary:
    """Makes `curves.png` and `report.html` of what the run directory holds.

    Args:
        run_dir: Holds `metrics.jsonl`, and `trajectories.jsonl` and `config.json` if there are.
        title: Heading of both.

    Returns:
        The summary that the report shows.

    Raises:
        OSError: `metrics.jsonl` cannot be read, or the files cannot be written.
    """
    records = read_metrics(run_dir / METRICS)
    summary = summarize(records)
    curves = run_dir / CURVES
    draw_curves(records, curves, title=title)
    trajectories: list[Mapping[str, object]] = []
    if (run_dir / TRAJECTORIES).exists():
        trajectories.extend(read_lines(run_dir / TRAJECTORIES))
    config: Mapping[str, object] = {}
    if (run_dir / CONFIG).exists():
        config = json.loads((run_dir / CONFIG).read_text(encoding="utf-8"))
    write_html(
        run_dir / REPORT,
        title=title,
        run_dir=run_dir,
        summary=summary,
        records=records,
        trajectories=trajectories,
        config=config,
        curves=curves.read_bytes(),
    )
    return summary
