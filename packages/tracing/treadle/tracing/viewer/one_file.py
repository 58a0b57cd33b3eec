"""The page of one run as a single file, which holds the run's data and refers to nothing else.

Invariant: the size is bounded, and what is left out is counted in the page. No text of a run is
markup: it is in one block of JSON, and the page makes text nodes of it.
"""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from treadle.tracing.trajectories.read import TrajectoryFiles
from treadle.tracing.trajectories.run_directories import METRICS
from treadle.tracing.trajectories.schema import SCHEMA
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
_SMALL: Final = ("step", "phase", "task_id", "reward", "error", "num_tokens")
_LARGE: Final = ("samples", "trace")
_TOKEN: Final = 20
"""Characters that a token takes at least, with its numbers."""
_Key = tuple[int, str]
"""Step and phase, which name a file."""
T = TypeVar("T")


class _Group(NamedTuple):
    key: _Key
    task_id: str
    rows: list[dict[str, Any]]


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
        groups = _choose(files, max_trajectories)
        share = _MAX_CHARACTERS // max(1, sum(len(group.rows) for group in groups))
        rows = itertools.islice(_read(files, groups, share), max_trajectories)
        trajectories = [_within(for_page(run, row), share) for row in rows]
        total = files.count()
        info = run.describe()
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


def _choose(files: TrajectoryFiles, most: int) -> list[_Group]:
    """Returns whole groups, spread evenly over the steps; validations get at most a third."""
    val = [key for key in files.steps() if key[1] == "val"]
    train = [key for key in files.steps() if key[1] != "val"]
    validated = _of_phase(files, val, most // 3 if train else most)
    room = most - sum(len(group.rows) for group in validated)
    return validated + _of_phase(files, train, room)


def _of_phase(files: TrajectoryFiles, keys: list[_Key], limit: int) -> list[_Group]:
    """Returns groups of at most `limit` trajectories, as few of each file as spread over them."""
    if not keys:
        return []
    largest = max((len(group.rows) for group in _groups(files, keys[-1:])), default=1)
    chosen = _thin_out(keys, max(1, limit // largest))
    per_file = max(1, limit // largest // len(chosen))
    by_key: dict[_Key, list[_Group]] = {}
    for group in _groups(files, chosen):
        by_key.setdefault(group.key, []).append(group)
    return [group for found in by_key.values() for group in _telling(found, per_file)]


def _groups(files: TrajectoryFiles, keys: list[_Key]) -> list[_Group]:
    """Returns the groups of some files with their small columns."""
    groups: dict[tuple[_Key, str], list[dict[str, Any]]] = {}
    for row in files.read_files(keys, _SMALL):
        groups.setdefault(((row["step"], row["phase"]), row["task_id"]), []).append(row)
    return [_Group(*names, rows) for names, rows in groups.items()]


def _telling(groups: list[_Group], count: int) -> list[_Group]:
    """Returns so many groups of a file, from those with failures over the worst to the best.

    A single one is one with failures, or else the one whose rewards differ most.
    """
    rewards = {id(each): [row["reward"] or 0.0 for row in each.rows] for each in groups}
    failed = {id(each): any(row["error"] is not None for row in each.rows) for each in groups}
    if count == 1:
        spread = {name: max(found) - min(found) for name, found in rewards.items()}
        return [max(groups, key=lambda each: (failed[id(each)], spread[id(each)]))]
    mean = {name: sum(found) / len(found) for name, found in rewards.items()}
    ranked = sorted(groups, key=lambda each: (not failed[id(each)], mean[id(each)]))
    return _thin_out(ranked, count)


def _read(files: TrajectoryFiles, groups: list[_Group], share: int) -> Iterator[dict[str, Any]]:
    """Yields the trajectories; the tokens of one that would be cut anyway are not even read."""
    for is_long in (False, True):
        columns = [name for name in SCHEMA.names if not is_long or name not in _LARGE]
        these = [
            group
            for group in groups
            if (max(row["num_tokens"] for row in group.rows) > share // _TOKEN) is is_long
        ]
        names = [(*group.key, group.task_id) for group in these]
        for row in files.read_files([group.key for group in these], columns, groups=names):
            yield row | ({"samples": [], "trace": [], "cut": True} if is_long else {})


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
