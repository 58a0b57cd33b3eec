"""Checks that the package shares: what the model passed, and what the catalogue configured.

The first kind of mistake is the model's and becomes `ToolFailure`, the second is ours and becomes
`SetupError`. All functions are pure.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from treadle.agent_loop import SetupError, ToolFailure


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
        extra: Of this package, that installs it.

    Raises:
        SetupError: The module is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise SetupError(
            f"{what} needs {module}, which is not installed: pip install 'treadle-tools[{extra}]'"
        )
