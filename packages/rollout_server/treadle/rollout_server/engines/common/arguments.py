"""Engine arguments: our keys and the user's own, merged into one call, or refused.

Invariant: nothing that the configuration sets is silently dropped. A key that an engine
cannot honour is refused with what to do instead; an argument of `engine_args` must exist in
the engine's own argument class and must not be one that a key of ours decides.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from treadle.rollout_server.config.schema import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnArgument:
    """One argument of the engine's library that we decide.

    Attributes:
        value: What it is given; None leaves it to the library, and to nobody else.
        key: The configuration key that decides it; "" when the adapter needs it as it is.
    """

    value: Any
    key: str = ""


def refuse_unhonoured(config: ServerConfig, engine: str, unhonoured: Mapping[str, str]) -> None:
    """Refuses keys that differ from their default and that the engine cannot honour.

    Args:
        config: What was asked for.
        engine: For the message.
        unhonoured: Path of the key -> what to do instead.

    Raises:
        ValueError: One of them is set.
    """
    for key, fix in unhonoured.items():
        value, default = _value(config, key), _value(ServerConfig(), key)
        if value != default:
            raise ValueError(f"{key} is {value!r}, which engine {engine!r} cannot honour: {fix}")


def merged_arguments(
    own: Mapping[str, OwnArgument],
    given: Mapping[str, Any],
    *,
    known: Collection[str],
    argument_class: str,
) -> dict[str, Any]:
    """The arguments for the engine's library.

    Args:
        own: Those that we decide, by their names there.
        given: `ServerConfig.engine_args`.
        known: Every name that there is.
        argument_class: The library's class, for the message.

    Raises:
        ValueError: A given name is not known, or is one of ours.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"engine_args.{name} is not an argument of {argument_class}{hint}")
        if name in own:
            fix = f"set {own[name].key}" if own[name].key else "leave it out, the adapter needs it"
            raise ValueError(f"engine_args.{name} is decided by this server: {fix}")
    ours = {name: argument.value for name, argument in own.items() if argument.value is not None}
    return ours | dict(given)


def _value(config: ServerConfig, key: str) -> object:
    value: object = config
    for part in key.split("."):
        assert isinstance(value, BaseModel)
        value = getattr(value, part)
    return value
