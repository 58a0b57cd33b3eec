"""References in values, `${...}`, as OmegaConf resolves them.

`${a.b}` is the value of a key, `${.b}` that of a neighbour (a further dot is a level up),
`${oc.select:a.b,1}` has a value for where the key is missing, and `${oc.env:NAME,x}` reads the
environment. They may be part of a text and stand in each other. Invariant: a value that is
returned holds no reference; what cannot be resolved is refused.
"""

import os
from collections.abc import Callable
from typing import Any

from treadle.tools.scalars import ScalarError, parse_value

__all__ = ["InterpolationError", "resolve"]


class InterpolationError(ValueError):
    """A reference cannot be resolved."""


def resolve(
    value: Any, key: str, look_up: Callable[[str], Any], *, within: tuple[str, ...] = ()
) -> Any:
    """Returns a value without references.

    Args:
        value: A raw value; lists and mappings are resolved within.
        key: The dotted key that has the value, from which relative references start.
        look_up: Returns the value of a key as written; raises a KeyError if it has none.
        within: The keys that led here.

    Raises:
        InterpolationError: A reference is malformed, leads nowhere, or back to itself.
    """
    if isinstance(value, list):
        return [resolve(item, key, look_up, within=within) for item in value]
    if isinstance(value, dict):
        return {k: resolve(v, key, look_up, within=within) for k, v in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value
    if key in within:
        raise InterpolationError(f"{' -> '.join((*within, key))}: a reference to itself")
    parts: list[Any] = []
    at = 0
    while (start := value.find("${", at)) >= 0:
        if value[:start].endswith("\\"):
            raise InterpolationError("a literal `${`, written `\\${`, is not available")
        end = _closing(value, start)
        reference = value[start + 2 : end]
        parts += [value[at:start], _referred(reference, key, look_up, (*within, key))]
        at = end + 1
    if len(parts) == 2 and not parts[0] and at == len(value):
        return parts[1]  # alone, a value keeps its type
    return "".join(map(str, (*parts, value[at:])))


def _closing(text: str, start: int) -> int:
    """Returns where the brace closes that follows the `$` at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if text[at] == "}" and not depth:
            return at
    raise InterpolationError("`${` is not closed; in a list, quote a reference that has a comma")


def _referred(
    reference: str, key: str, look_up: Callable[[str], Any], within: tuple[str, ...]
) -> Any:
    """Returns what stands for `${reference}` in the value of a key."""

    def inner(text: str) -> Any:  # a part of the same value: no step to another key
        return resolve(text, key, look_up, within=within[:-1])

    resolver, colon, arguments = _split(reference, ":")
    if colon and resolver not in ("oc.select", "oc.env"):
        raise InterpolationError(
            f"${{{resolver}:...}} is not available: only ${{KEY}}, ${{oc.select:KEY,DEFAULT}} and "
            "${oc.env:NAME,DEFAULT} are"
        )
    name, comma, default = _split(arguments, ",") if colon else (reference, "", "")
    name = str(inner(name.strip()))
    if resolver == "oc.env" and name in os.environ:
        return os.environ[name]
    if resolver != "oc.env":
        up = len(name) - len(name.lstrip("."))
        place = ".".join((*key.split(".")[:-up], name[up:])) if up else name
        try:
            found = look_up(place)
        except KeyError:
            if not colon:
                raise InterpolationError(f"there is no key {place}") from None
        else:
            return resolve(found, place, look_up, within=within)
    elif not comma:
        raise InterpolationError(f"the environment has no {name}: set it, or give a default")
    try:
        otherwise = inner(default) if "${" in default else parse_value(default) if comma else None
    except ScalarError as error:
        raise InterpolationError(str(error)) from None
    # The environment has texts only, as in OmegaConf.
    return str(otherwise) if resolver == "oc.env" and otherwise is not None else otherwise


def _split(text: str, mark: str) -> tuple[str, str, str]:
    """Partitions a text at a mark that is outside nested references."""
    depth = 0
    for at, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == mark and not depth:
            return text[:at], mark, text[at + 1 :]
    return text, "", ""
