"""JSON inside a text: parses it, finds its end, and describes errors for the model.

Invariant: only JSON is accepted, and only if it can be written as JSON again: no NaN, no lone
surrogates, no number beyond a double, and no nesting too deep to be pickled or copied during a
run. Nothing is evaluated.
"""

import json
from typing import NoReturn

from treadle.agent_loop.parsers.scan import Scan


class CallError(Exception):
    """A call is malformed. `str(error)` is shown to the model."""


class _CutStringError(CallError):
    """The text ended inside a string."""


def _refuse_constant(name: str) -> NoReturn:
    raise CallError(f"{name} is not JSON")


MAX_DEPTH = 64
"""Levels of lists and objects that an argument may have."""
_TOO_DEEP = f"the JSON is nested too deeply: {MAX_DEPTH} levels are taken"
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def decode_json(text: str, start: int = 0) -> tuple[object, int]:
    """Returns the JSON value at `start`, and the position after it.

    Raises:
        CallError: There is no JSON value, or it cannot be written again.
    """
    try:
        value, stop = _DECODER.raw_decode(text, start)
        # "\\ud800" and 1e999 parse as JSON, but cannot be rendered or written again.
        _ENCODER.encode(value).encode()
    except json.JSONDecodeError as error:
        cut = error.msg.startswith("Unterminated string")
        kind = _CutStringError if cut else CallError
        message = error.msg.removesuffix(" at")  # as of an invalid control character
        raise kind(f"{message} at character {error.pos - start} of its JSON") from None
    except RecursionError:
        raise CallError(_TOO_DEEP) from None
    except ValueError as error:
        raise CallError(str(error)) from None
    opened = text.count("{", start, stop) + text.count("[", start, stop)
    if opened > MAX_DEPTH and _is_deep(value):
        raise CallError(_TOO_DEEP)
    return value, stop


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inside: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inside.extend(item.values())
            elif isinstance(item, list):
                inside.extend(item)
        if not any(isinstance(item, dict | list) for item in level):
            return False
        level = inside
    return True


def read_value(text: str) -> object:
    """Returns the JSON value that is the whole text, for formats that are not JSON themselves.

    Raises:
        CallError: It is none. The error does not speak of JSON: the model was not asked for it.
    """
    bare = text.strip()
    try:
        value, stop = decode_json(bare)
    except CallError:
        stop = -1
    if stop != len(bare):
        raise CallError(
            f"{bare[:40]!r} is not a number, true, false or null, nor a list or an object whose "
            "strings are in double quotes"
        )
    return value


def read_json(scan: Scan, start: int, *before: str) -> tuple[object, int]:
    """Parses the JSON value at `start`.

    Args:
        start: Position of the value's first character, not white space.
        before: The value ends before these marks, unless they are inside a string.

    Returns:
        The value, and the position after it.

    Raises:
        CallError: There is no JSON value, or it cannot be written again.
    """
    mark = scan.find_first(start, *before)
    while mark >= 0:
        try:
            # A slice, because a JSON error counts the lines of all the text before its position.
            value, length = decode_json(scan.text[start:mark])
        except _CutStringError:
            mark = scan.find_first(start + 2 * (mark - start), *before)
        else:
            return value, start + length
    return decode_json(scan.text, start)


def read_object(scan: Scan, start: int, *before: str) -> tuple[dict[str, object], int]:
    """Parses the JSON object at `start`, like `read_json`."""
    value, stop = read_json(scan, start, *before)
    if not isinstance(value, dict):
        raise CallError(f"the arguments must be a JSON object, got {json_type(value)}")
    return value, stop


def read_call(
    value: object, *, name: str = "name", arguments: tuple[str, ...] = ("arguments",)
) -> tuple[str, dict[str, object]]:
    """Returns name and arguments of a call that is one JSON object.

    Args:
        arguments: Accepted keys of the arguments; the first one is the correct one.

    Raises:
        CallError: A key is missing or of the wrong type.
    """
    if not isinstance(value, dict):
        raise CallError(f"the call must be a JSON object, got {json_type(value)}")
    key = next((key for key in arguments if key in value), None)
    if name not in value:
        raise CallError(f"the call has no {name!r}")
    if key is None:
        raise CallError(f"the call has no {arguments[0]!r}")
    named, given = value[name], value[key]
    if not isinstance(named, str) or not named:
        raise CallError(f"{name!r} must be a string, got {json_type(named)}")
    if not isinstance(given, dict):
        raise CallError(f"{key!r} must be a JSON object, got {json_type(given)}")
    return named, given


def write_json(value: object) -> str:
    """Writes a value as chat templates do."""
    return json.dumps(value, ensure_ascii=False)


def json_type(value: object) -> str:
    """Returns the name of a JSON value's type, for errors."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case "":
            return "an empty string"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
