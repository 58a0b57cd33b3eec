"""The trajectories on the page: a page of the table, and one trajectory with its neighbours.

Invariant: a page of the table reads the small columns only. One trajectory reads its own file whole
and of the others of its group and of its row only what a list needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from treadle.tracing.trajectories import Filter, TrajectoryFiles
from treadle.tracing.trajectories.filter import Condition
from treadle.tracing.viewer.runs import Run

__all__ = ["for_page", "list_facets", "list_page", "read_trajectory"]

_TABLE: Final = (
    *("step", "phase", "task_id", "rollout_index", "reward", "advantage", "stop", "error"),
    *("num_turns", "num_tokens", "duration_s", "drift", "tools", "prompt", "response"),
)
_GROUP: Final = ("rollout_index", "reward", "advantage", "stop", "num_turns", "response", "error")
_OTHERS: Final = ("step", "rollout_index", "reward", "stop", "response")
_MAX_OTHERS: Final = 2_000
_MAX_TEXT: Final = 200
_FACETS: Final = {
    "steps": "SELECT step, phase, count(*) AS trajectories FROM trajectories GROUP BY ALL "
    "ORDER BY step, phase",
    "stops": "SELECT DISTINCT stop FROM trajectories ORDER BY 1 LIMIT 100",
    "tools": "SELECT DISTINCT unnest(tools) AS tool FROM trajectories ORDER BY 1 LIMIT 100",
}


def list_facets(trajectories: TrajectoryFiles) -> dict[str, Any]:
    """Returns the steps with their numbers of trajectories, the stop reasons and the tools."""
    found = {name: trajectories.sql(text).to_pylist() for name, text in _FACETS.items()}
    return {
        "steps": found["steps"],
        "stops": [row["stop"] for row in found["stops"]],
        "tools": [row["tool"] for row in found["tools"]],
    }


def list_page(
    trajectories: TrajectoryFiles,
    *,
    where: Filter,
    order_by: Sequence[str],
    limit: int,
    offset: int,
) -> dict[str, Any]:
    """Returns some of the trajectories that pass a filter, and how many do.

    Raises:
        UnknownColumnError: The order names no column.
    """
    rows = trajectories.query(where, _TABLE, order_by, limit, offset)
    for row in rows:
        row["prompt"], row["response"] = row["prompt"][:_MAX_TEXT], row["response"][:_MAX_TEXT]
    return {"rows": rows, "total": trajectories.count(where), "offset": offset}


def read_trajectory(
    run: Run, *, step: int, phase: str, task_id: str, rollout_index: int
) -> dict[str, Any] | None:
    """Returns a trajectory, its group, and those of its row at other steps; None: it is absent."""
    found = run.trajectories.one(step, phase, task_id, rollout_index)
    if found is None:
        return None
    same_row = Filter((Condition("task_id", "=", task_id), Condition("phase", "=", phase)))
    this_step = Filter((Condition("step", "=", float(step)),))
    other_steps = Filter((Condition("step", "!=", float(step)),))
    return {
        **for_page(run, found),
        "group": run.trajectories.query(same_row & this_step, _GROUP),
        "other_steps": run.trajectories.query(same_row & other_steps, _OTHERS, limit=_MAX_OTHERS),
    }


def for_page(run: Run, row: dict[str, Any]) -> dict[str, Any]:
    """Returns all columns of a trajectory with JSON as data, and with the text of each token."""
    for sample in row["samples"]:
        _add_pieces(run, sample)
    for span in row["trace"]:
        span["attributes"] = _parsed(span["attributes"], {})
    return row | {"messages": _parsed(row["messages"], [])}


def _add_pieces(run: Run, sample: dict[str, Any]) -> None:
    """Gives each span `pieces`, the text of its tokens; None where it is not known."""
    for span in sample["spans"]:
        text, vocabulary = span["text"], run.token_text
        ids = sample["ids"][span["start"] : span["stop"]]
        span["pieces"] = (
            None if text is None or vocabulary is None else vocabulary.pieces(ids, text)
        )


def _parsed(text: str, otherwise: Any) -> Any:
    """Returns the value of JSON text, or `otherwise` if it is of another type."""
    try:
        value = json.loads(text)
    except (RecursionError, ValueError):
        return otherwise
    return value if isinstance(value, type(otherwise)) else otherwise
