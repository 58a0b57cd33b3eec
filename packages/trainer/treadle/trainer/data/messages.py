"""Messages in a row's columns: prompts, and the conversations of fine-tuning.

A message is a mapping with `role` and `content`, by role also `tool_calls`, `reasoning_content`,
`tool_call_id` and `name`, as OpenAI's clients and the library `datasets` write it. null means
missing. Content is a text, or parts of the types `text` and `image`; a part of an image stands for
one of the row's images. `developer` is `system`.

Invariant: nothing of a message is ignored: what is not understood is a `WrongMessage`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from treadle.agent_loop import IMAGE_MARK, Message, Role, ToolCall

__all__ = ["WrongMessage", "check_without_null", "decoded", "read_list", "read_message"]

_KEYS: Mapping[str, tuple[str, ...]] = {
    "system": ("content",),
    "user": ("content",),
    "assistant": ("content", "tool_calls", "reasoning_content"),
    "tool": ("content", "tool_call_id", "name"),
}


class WrongMessage(ValueError):
    """A message cannot be used; the text gives the field and the cause."""


def read_list(value: object, where: str) -> Sequence[object]:
    """Returns a list, which may be given as a JSON text."""
    value = decoded(value, where)
    if not isinstance(value, list):
        raise WrongMessage(f"{where} must be a list, or a JSON text of one, got {value!r:.80}")
    return value


def decoded(value: object, where: str) -> object:
    """Returns a value, which may be given as a JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise WrongMessage(
            f"{where} is a string that is not JSON: {error}: {value!r:.80}"
        ) from None


def read_message(value: object, where: str, *, exact: bool, images: bool) -> Message:
    """Returns one message.

    Args:
        value: Raw value of the row's column.
        where: Names the message in errors, as "prompt[0]".
        images: Whether the row has images that a part can stand for.

    Raises:
        WrongMessage: It has another form.
    """
    if not isinstance(value, Mapping):
        raise WrongMessage(f"{where} must be a mapping with role and content, got {value!r:.80}")
    given = {key: entry for key, entry in value.items() if entry is not None and entry != []}
    role = given.pop("role", None)
    role = "system" if role == "developer" else role
    if not isinstance(role, str) or role not in _KEYS:
        raise WrongMessage(f"{where}.role must be {', '.join(_KEYS)}, got {role!r:.40}")
    known = _KEYS[role]
    if unknown := sorted(set(map(str, given)) - set(known)):
        raise WrongMessage(
            f"{where} is of the role {role} and has the unknown keys {', '.join(unknown)}; known: "
            f"role, {', '.join(known)}"
        )
    if "content" in given:
        given["content"] = _content(given["content"], f"{where}.content", images=images)
    for key, entry in given.items():
        if key != "tool_calls" and not isinstance(entry, str):
            raise WrongMessage(f"{where}.{key} must be a string, got {entry!r:.80}")
    calls = read_list(given.pop("tool_calls", []), f"{where}.tool_calls")
    if "content" not in given and not calls:
        raise WrongMessage(f"{where} has no content")
    return Message(
        role=cast(Role, role),
        content=given.pop("content", ""),
        tool_calls=tuple(
            _call(call, f"{where}.tool_calls[{i}]", i, exact=exact) for i, call in enumerate(calls)
        ),
        reasoning=given.pop("reasoning_content", None),
        **given,
    )


def _content(value: object, where: str, *, images: bool) -> object:
    """Returns a content of parts as a text, with marks where images are; another one as it is."""
    if not isinstance(value, list):
        return value
    texts = []
    for number, part in enumerate(value):
        here = f"{where}[{number}]"
        given = _section(part, here, ("type", "text", "image"))
        if given == {"type": "image"} and images:
            texts.append(IMAGE_MARK)
        elif given.keys() == {"type", "text"} and given["type"] == "text":
            texts.append(cast(str, given["text"]))
        else:
            raise WrongMessage(
                f'{here} must be {{"type": "text", "text": ...}}, or {{"type": "image"}} where the '
                f"row's column of images has the image, got {part!r:.80}"
            )
        if not isinstance(texts[-1], str):
            raise WrongMessage(f"{here}.text must be a string, got {texts[-1]!r:.80}")
    return "".join(texts)


def _call(value: object, where: str, number: int, *, exact: bool) -> ToolCall:
    call = _section(value, where, ("id", "type", "function"))
    if call.get("type", "function") != "function":
        raise WrongMessage(f"{where}.type must be function, got {call['type']!r:.40}")
    function = _section(call.get("function"), f"{where}.function", ("name", "arguments"))
    name, where = function.get("name"), f"{where}.function.arguments"
    if not isinstance(name, str) or not name:
        raise WrongMessage(
            f"{where.removesuffix('arguments')}name must be a string, got {name!r:.40}"
        )
    given = function.get("arguments", {})
    arguments = decoded(given, where)
    if not isinstance(arguments, Mapping):
        raise WrongMessage(f"{where} must be a mapping or a JSON text of one, got {given!r:.80}")
    if arguments is given and not exact:
        check_without_null(arguments, where)
    return ToolCall(id=str(call.get("id", f"call-{number}")), name=name, arguments=arguments)


def _section(value: object, where: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise WrongMessage(f"{where} must be a mapping with {', '.join(known)}, got {value!r:.80}")
    given = {str(key): entry for key, entry in value.items() if entry is not None}
    if unknown := sorted(set(given) - set(known)):
        raise WrongMessage(
            f"{where} has the unknown keys {', '.join(unknown)}; known: {', '.join(known)}"
        )
    return given


def check_without_null(value: object, where: str) -> None:
    """Rejects null: in Parquet it also stands for a key that only other rows have."""
    if (place := next(_nulls(value, where), None)) is not None:
        raise WrongMessage(
            f"{place} is null, which may stand for a missing key: write {where} as JSON text"
        )


def _nulls(value: object, where: str) -> Iterator[str]:
    if value is None:
        yield where
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _nulls(entry, f"{where}.{key}")
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from _nulls(entry, f"{where}[{index}]")
