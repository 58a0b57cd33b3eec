"""Makes the files for people, `report.html` and `curves.png`, from those that a run wrote.

Invariant: everything shown is read back from the run directory, so the report of a run that goes
on, was killed, resumed or copied from another machine is made by the same call. A reader of a file
sees the one before or the new one. Takes seconds; the caller chooses the thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from treadle.trainer.report.metrics import Record, read_metrics
from treadle.trainer.report.page.curves import draw_curves
from treadle.trainer.report.summary import Summary, summarize, summary_rows

METRICS = "metrics.jsonl"
CONFIG = "config.json"
CURVES = "curves.png"
REPORT = "report.html"


def write_reports(run_dir: Path) -> Summary:
    """Makes `curves.png` and `report.html` of what the run directory holds by now.

    Returns:
        The summary that the report shows.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: A file is damaged; the text names it.
    """
    with _replaced(run_dir / CURVES) as curves:
        draw_curves(_records(run_dir), curves, title=_title(_config(run_dir), run_dir))
    return write_page(run_dir, run_dir / REPORT)


def write_page(run_dir: Path, out: Path, *, in_brief: bool = False) -> Summary:
    """Writes the report of a run to `out`; otherwise as `write_reports`.

    Args:
        in_brief: A fifth of the trajectories, in a third of the time.
    """
    from treadle.tracing.viewer.one_file import MAX_TRAJECTORIES, make_page

    summary = summarize(_records(run_dir))
    name = _title(_config(run_dir), run_dir)
    page = make_page(
        run_dir,
        name=name,
        summary=summary_rows(summary, run_dir),
        max_trajectories=MAX_TRAJECTORIES // 5 if in_brief else MAX_TRAJECTORIES,
    )
    with _replaced(out) as partial:
        partial.write_text(page, encoding="utf-8", errors="replace")  # a lone surrogate is not text
    return summary


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yields a file that takes the place of `path` when the block ends, and is removed if not."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:  # a full disk must not keep half of it
        partial.unlink(missing_ok=True)


def _records(run_dir: Path) -> tuple[Record, ...]:
    """Returns the lines of the metrics log; none before the run has begun to write it."""
    path = run_dir / METRICS
    return read_metrics(path) if path.exists() else ()


def _config(run_dir: Path) -> Mapping[str, Any]:
    path = run_dir / CONFIG
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged: not an object")
    return config


def _title(config: Mapping[str, Any], run_dir: Path) -> str:
    run = config.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("name"), str):
        return run_dir.absolute().name
    return f"{run['project']}: {run['name']}" if run.get("project") else run["name"]
