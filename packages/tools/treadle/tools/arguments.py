"""Checks that the package shares: what the model passed, what the catalogue and the row hold.

The first kind of mistake is the model's and becomes `ToolFailure`, the second is ours and becomes
`SetupError`. All functions are pure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from treadle.agent_loop import AgentTask, SetupError, ToolFailure


def text_argument(tool: str, arguments: Mapping[str, object], name: str) -> str:
    """Returns the one argument `name` that `tool` takes, a string.

    Raises:
        ToolFailure: It is missing or not a string, or there are others.
    """
    unknown = sorted(set(arguments) - {name})
    if name not in arguments or unknown:
        given = ", ".join(map(repr, sorted(arguments))) or "none"
        raise ToolFailure(f"{tool} takes the argument {name!r}; given: {given}.")
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolFailure(f"The argument {name!r} must be a string, not {value!r}.")
    return value


def no_settings(tool: str, config: Mapping[str, object] | None) -> None:
    """Rejects any setting of a tool that has none.

    Raises:
        SetupError: `config` is not empty; the message lists its keys.
    """
    if config:
        keys = ", ".join(map(repr, sorted(config)))
        raise SetupError(f"{tool} has no settings; remove {keys} from its config")


def require_extra(what: str, module: str, extra: str) -> None:
    """Raises at start if a library is not installed.

    Args:
        what: Needs it, for the error.
        extra: Name of this package's extra that installs it.

    Raises:
        SetupError: The module is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise SetupError(
            f"{what} needs {module}, which is not installed: pip install 'treadle-tools[{extra}]'"
        )


def as_truth(value: object) -> str | None:
    """Returns a ground truth as text, an integer as its digits; None if it is neither."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return value if isinstance(value, str) else None


def truth_of(task: AgentTask, *path: str, needed_by: str) -> str:
    """Returns the ground truth that the row of a task has at a path.

    Raises:
        SetupError: There is no text and no integer.
    """
    value: object = task.fields
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    truth = as_truth(value)
    if truth is None:
        raise SetupError(
            f"task {task.task_id!r}: {needed_by} needs a string or an integer in {'.'.join(path)} "
            f"of its row, found {value!r}"
        )
    return truth
