"""The page of one run as a single file, which holds the run's data and refers to nothing else.

Invariant: the size is bounded, and what is left out is counted in the page. No text of a run is
markup: it is in one block of JSON, and the page makes text nodes of it.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from treadle.tracing.trajectories.read import TrajectoryFiles
from treadle.tracing.trajectories.run_directories import METRICS
from treadle.tracing.viewer.metric_lines import read_lines
from treadle.tracing.viewer.runs import Run
from treadle.tracing.viewer.trajectory import for_page

__all__ = ["MAX_TRAJECTORIES", "make_page"]

_STATIC: Final = Path(__file__).parent / "static"
MAX_TRAJECTORIES: Final = 300
_MAX_CHARACTERS: Final = 8_000_000
"""Maximum for all trajectories."""
_MAX_STEPS: Final = 500
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
_Key = tuple[int, str]
T = TypeVar("T")


def make_page(
    directory: Path,
    *,
    name: str,
    summary: Sequence[Sequence[str]],
    max_trajectories: int = MAX_TRAJECTORIES,
) -> str:
    """Returns the page, as HTML.

    Args:
        name: Title of the page and of the run.
        summary: Rows of a table, the first one its heading.

    Raises:
        OSError: A file cannot be read.
        ValueError: One of them nests too deeply.
    """
    run = Run(directory, name)
    with run.trajectories as files:
        shown = _choose(files, max_trajectories)
        share = _MAX_CHARACTERS // max(1, len(shown))
        total = files.count()
        info = run.describe()
        trajectories = [_within(for_page(run, row), share) for row in shown]
    lines, damaged = read_lines(directory / METRICS)
    validated = [line for line in lines if any(name.startswith("val/") for name in line)]
    kept = {id(line) for line in _thin_out(lines, _MAX_STEPS) + _thin_out(validated, _MAX_STEPS)}
    data = {
        "written": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "runs": [info | {"summary": summary}],
        "metrics": {"lines": [line for line in lines if id(line) in kept], "damaged": damaged},
        "num_steps": len(lines),
        "num_trajectories": total,
    }
    return _assemble(f'{_json(data)[:-1]},"trajectories":[{",".join(trajectories)}]}}')


def _choose(files: TrajectoryFiles, most: int) -> list[dict[str, Any]]:
    """Returns whole groups, spread evenly over the steps; validations get at most a third."""
    val = [key for key in files.steps() if key[1] == "val"]
    train = [key for key in files.steps() if key[1] != "val"]
    validated = _of_phase(files, val, most // 3 if train else most)
    return validated + _of_phase(files, train, most - len(validated))


def _of_phase(files: TrajectoryFiles, keys: list[_Key], limit: int) -> list[dict[str, Any]]:
    """Returns at most `limit` trajectories of some files, as few of each as spread over them."""
    if not keys:
        return []
    largest = max((len(group) for _, group in _ranked(files, keys[-1:])), default=1)
    chosen = _thin_out(keys, max(1, limit // largest))
    per_step = max(1, limit // largest // len(chosen))
    by_step: dict[int, list[str]] = {}
    for (step, task_id), _ in _ranked(files, chosen):
        by_step.setdefault(step, []).append(task_id)
    groups = [(s, each) for s, found in by_step.items() for each in _thin_out(found, per_step)]
    return files.read_files(chosen, groups=groups)[:limit]


def _ranked(
    files: TrajectoryFiles, keys: list[_Key]
) -> list[tuple[tuple[int, str], list[dict[str, Any]]]]:
    """Returns the groups of some files, from failures over the worst to the best mean reward."""
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in files.read_files(keys, ("step", "task_id", "reward", "error")):
        groups.setdefault((row["step"], row["task_id"]), []).append(row)

    def rank(group: tuple[object, list[dict[str, Any]]]) -> tuple[bool, float]:
        rewards = [row["reward"] or 0.0 for row in group[1]]
        return all(row["error"] is None for row in group[1]), sum(rewards) / len(rewards)

    return sorted(groups.items(), key=rank)


def _within(trajectory: dict[str, Any], characters: int) -> str:
    """Returns a trajectory as JSON of about so many characters; `cut`: something is left out."""
    for span in trajectory["trace"]:
        for name in ("inputs", "output"):  # The messages have them.
            span["attributes"].pop(name, None)
    text = _json(trajectory)
    if len(text) > characters:
        trajectory |= {"samples": [], "trace": [], "cut": True}
        text = _json(trajectory)
    if len(text) > characters:
        left = characters

        def cut(value: Any) -> Any:
            nonlocal left
            if isinstance(value, str):
                kept = value[: max(0, left)]
                left -= len(kept)
                return kept
            left -= 10
            if isinstance(value, list):
                return [cut(item) for item in value if left > 0]
            if isinstance(value, dict):
                return {key: cut(item) for key, item in value.items()}
            return value

        text = _json(cut(trajectory))
    return text


def _rounded(value: Any) -> Any:
    """Returns plain data with numbers of six digits, and null for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def _json(value: Any) -> str:
    """Returns JSON that cannot end the element around it."""
    try:
        value = _rounded(value)
    except RecursionError:
        raise ValueError("config.json, status.json or a trajectory nests too deeply") from None
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _thin_out(items: Sequence[T], limit: int) -> list[T]:
    """Returns at most `limit` of them, evenly from the first to the last, in their order."""
    count = len(items)
    if count <= limit:
        return list(items)
    if limit == 1:
        return [items[-1]]
    return [items[i * (count - 1) // (limit - 1)] for i in range(limit)]


def _assemble(data: str) -> str:
    """Returns the page with its styles, scripts and data in it.

    Modules in a page have no addresses; an import map gives each a name and its text.
    """
    page = (_STATIC / "index.html").read_text(encoding="utf-8")
    scripts = {}
    for path in _STATIC.glob("*.js"):
        text = re.sub(r'from "\./(\w+)\.js"', r'from "\1"', path.read_text(encoding="utf-8"))
        scripts[path.stem] = _data_url("text/javascript", text)
    icon = _data_url("image/svg+xml", (_STATIC / "icon.svg").read_text(encoding="utf-8"))
    page = page.replace('"icon.svg"', f'"{icon}"')
    page = re.sub(
        r'<link rel="stylesheet" href="(\w+\.css)" />',
        lambda match: f"<style>\n{(_STATIC / match[1]).read_text(encoding='utf-8')}</style>",
        page,
    )
    return page.replace(
        '<script type="module" src="main.js"></script>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}" />\n'
        f'<script type="application/json" id="one-file">{data}</script>\n'
        f'<script type="importmap">{json.dumps({"imports": scripts})}</script>\n'
        '<script type="module">import "main";</script>',
    )


def _data_url(media_type: str, text: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(text.encode()).decode()}"
