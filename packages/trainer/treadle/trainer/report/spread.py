"""The spread of time, turns and lengths over a step's trajectories.

A rollout ends with its slowest trajectory, so a mean hides the long tail: the minimum and maximum
show it, and `agent_loop/slowest/*` breaks down the time of the slowest trajectory. verl reports the
same as `agent_loop/generate_sequences/*`, `agent_loop/tool_calls/*` and `agent_loop/slowest/*`. All
functions are pure.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from treadle.agent_loop import Trajectory

__all__ = ["spread_metrics"]

_GENERATE: Final = "agent_loop/generate_s"
_TOOL_CALLS: Final = "agent_loop/tool_calls_s"


def _reported(trajectory: Trajectory, name: str) -> float | None:
    """Returns a number that the loop or its tools reported; None if they reported none."""
    values = [metric.value for metric in trajectory.metrics if metric.name == name]
    return sum(values) if values else None


def _prompt_tokens(trajectory: Trajectory) -> int:
    return sum(sample.num_prompt_tokens for sample in trajectory.samples)


def _response_tokens(trajectory: Trajectory) -> int:
    return sum(len(sample.response_ids) for sample in trajectory.samples)


_NUMBERS: Final[Mapping[str, Callable[[Trajectory], float | None]]] = MappingProxyType(
    {
        "agent_loop/generate_{}_s": lambda trajectory: _reported(trajectory, _GENERATE),
        "agent_loop/tool_calls_{}_s": lambda trajectory: _reported(trajectory, _TOOL_CALLS),
        "rollout/turns_{}": lambda trajectory: trajectory.num_turns,
        "rollout/prompt_tokens_{}": _prompt_tokens,
        "rollout/response_tokens_{}": _response_tokens,
    }
)
"""Name of a metric, with a place for `min` and `max`, to its number of one trajectory."""


def spread_metrics(ended: Sequence[Trajectory]) -> dict[str, float]:
    """Returns least, greatest and slowest of the trajectories that ended without error.

    Returns:
        For each of `agent_loop/generate_*_s`, `agent_loop/tool_calls_*_s` (seconds),
        `rollout/turns_*`, `rollout/prompt_tokens_*` and `rollout/response_tokens_*` its `min` and
        `max`, if a trajectory has the number; and, of the trajectory with the most seconds in
        completions and tools, `agent_loop/slowest/generate_s`, `.../tool_calls_s`,
        `.../prompt_tokens` and `.../response_tokens`, if a loop measured its completions.
    """
    metrics: dict[str, float] = {}
    for name, number in _NUMBERS.items():
        values = [value for t in ended if (value := number(t)) is not None]
        if values:
            metrics[name.format("min")] = float(min(values))
            metrics[name.format("max")] = float(max(values))
    timed = [t for t in ended if _reported(t, _GENERATE) is not None]
    if timed:
        slowest = max(timed, key=_seconds)
        metrics |= {
            "agent_loop/slowest/generate_s": _reported(slowest, _GENERATE) or 0.0,
            "agent_loop/slowest/tool_calls_s": _reported(slowest, _TOOL_CALLS) or 0.0,
            "agent_loop/slowest/prompt_tokens": float(_prompt_tokens(slowest)),
            "agent_loop/slowest/response_tokens": float(_response_tokens(slowest)),
        }
    return metrics


def _seconds(trajectory: Trajectory) -> float:
    return sum(_reported(trajectory, name) or 0.0 for name in (_GENERATE, _TOOL_CALLS))
