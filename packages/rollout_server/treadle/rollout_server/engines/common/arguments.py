"""Engine arguments: our configuration keys merged with the user's `engine_args`, or rejected.

Invariant: no setting is silently dropped. A key that an engine does not support is rejected with
the alternative; an argument in `engine_args` must exist in the engine library's argument class
and must not be managed by the server.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import ModelInfo

EXPERTS_ARGUMENT = "enable_return_routed_experts"
"""The argument of vLLM and of SGLang for reports of the experts that the model chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedArgument:
    """An argument of the engine's library that the server sets; `engine_args` may not.

    Attributes:
        value: Its value; None means the library's default.
        key: The configuration key that sets it; "" if the adapter needs a fixed value.
    """

    value: Any
    key: str = ""


def reject_unsupported(config: ServerConfig, engine: str, unsupported: Mapping[str, str]) -> None:
    """Rejects keys that the engine does not support and that differ from their default.

    Args:
        engine: Engine name, for the message.
        unsupported: Path of the key -> what to do instead.

    Raises:
        ValueError: An unsupported key is set.
    """
    for key, fix in unsupported.items():
        value, default = _value(config, key), _value(ServerConfig(), key)
        if value != default:
            raise ValueError(f"{key} is {value!r}, which engine {engine!r} does not support: {fix}")


def experts_are_reported(config: ServerConfig, model: ModelInfo, problems: Collection[str]) -> bool:
    """Returns whether the engine reports the experts that the model chooses.

    It does if it can, unless `EXPERTS_ARGUMENT` in `engine_args` is false.

    Args:
        model: The model that is served.
        problems: Settings with which the engine cannot report them.

    Raises:
        ValueError: `engine_args` demand it, and it cannot.
    """
    if not model.num_moe_layers:
        problems = [*problems, f"{model.architecture} has no experts here"]
    if problems and config.engine_args.get(EXPERTS_ARGUMENT):
        raise ValueError(
            f"engine_args.{EXPERTS_ARGUMENT} is true, but {', '.join(problems)}: change that, or "
            f"leave {EXPERTS_ARGUMENT} out"
        )
    return not problems and bool(config.engine_args.get(EXPERTS_ARGUMENT, True))


def merge_arguments(
    managed: Mapping[str, ManagedArgument],
    given: Mapping[str, Any],
    *,
    known: Collection[str],
    argument_class: str,
) -> dict[str, Any]:
    """Returns the arguments for the engine's library.

    Args:
        managed: Arguments that the server sets, by their names in the library.
        known: All argument names of the library.
        argument_class: The library's argument class, for the message.

    Raises:
        ValueError: A given name is unknown or is managed by the server.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"engine_args.{name} is not an argument of {argument_class}{hint}")
        if name in managed:
            key = managed[name].key
            fix = f"set {key}" if key else "leave it out, the adapter needs a fixed value"
            raise ValueError(f"engine_args.{name} is set by this server: {fix}")
    ours = {name: own.value for name, own in managed.items() if own.value is not None}
    return ours | dict(given)


def _value(config: ServerConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        assert isinstance(value, BaseModel)
        value = getattr(value, part)
    return value
