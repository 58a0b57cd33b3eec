"""Conversions between OpenAI's messages and this package's.

Invariant: pure; no content is dropped, and what cannot be rendered is an `ApiError` that names its
position. Keys that nothing reads, which other providers add to what an agent sends back, are
counted. Reading the output of `written` gives the original message again, so a session recognises
its own turns.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from treadle.agent_loop.json_values import has_more_values
from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.errors import ApiError, bad_value, unsupported
from treadle.agent_loop.types import IMAGE_MARK, AgentTask, Image, Message, Role, ToolCall

MAX_VALUES = 1 << 18
"""Most brackets and commas in a request, and in the arguments of its calls: a second's work."""
_SURROGATE = re.compile(rb"\\u[dD]")
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_CONTENT = frozenset({"audio", "function_call", "images", "refusal", "tool_calls", "tool_call_id"})
"""Keys with a part of the conversation: refused in messages that have no room for them."""
_KEYS = {
    "system": ("role", "content"),
    "user": ("role", "content"),
    "assistant": ("role", "content", "tool_calls", "reasoning_content", "reasoning"),
    "tool": ("role", "content", "tool_call_id", "name"),
}


def read_messages(value: object, allowed: Allowances) -> tuple[Message, ...]:
    """Parses `messages`; `allowed` takes the keys that nothing reads.

    Raises:
        ApiError: They cannot be rendered, or the last one is the assistant's, or the arguments of
            their calls have more than `MAX_VALUES`.
    """
    if not isinstance(value, list) or not value:
        raise bad_value("messages", "it must be a list with at least one message")
    # One that hides the next ones, for it lacks a quote, is refused before they are parsed.
    check_arguments(_arguments(value))
    messages = tuple(_message(entry, f"messages[{i}]", allowed) for i, entry in enumerate(value))
    check_last(messages, f"messages[{len(messages) - 1}]")
    return messages


def check_last(messages: Sequence[Message], place: str) -> None:
    """Checks that the model can answer the last message, which is at `place`.

    Raises:
        ApiError: It is the assistant's.
    """
    if messages[-1].role == "assistant":
        raise unsupported(
            place, "the last message is the assistant's; continuing it is not supported"
        )


def check_arguments(texts: Iterable[str]) -> None:
    """Checks that the arguments of all calls have no more than `MAX_VALUES`.

    Raises:
        ApiError: They have more.
    """
    _check_values(",".join(texts).encode(), "the arguments of the calls have")


def written(message: Message) -> dict[str, object]:
    """Returns an assistant's message in OpenAI's format."""
    answer: dict[str, object] = {"role": "assistant", "content": message.content}
    if message.tool_calls:
        answer["content"] = message.content or None
        answer["tool_calls"] = [written_call(call) for call in message.tool_calls]
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    return answer


def written_message(message: Message) -> dict[str, object]:
    """Returns a message of any role in OpenAI's format."""
    if message.role == "assistant":
        return written(message)
    answer: dict[str, object] = {"role": message.role, "content": _written_content(message)}
    if message.tool_call_id is not None:
        answer["tool_call_id"] = message.tool_call_id
    return answer


def written_task(task: AgentTask) -> dict[str, object]:
    """Returns a task as JSON data, for an agent that is a program.

    Raises:
        TypeError: A field of the task is not JSON.
    """
    return {
        "task_id": task.task_id,
        "rollout_index": task.rollout_index,
        "messages": [written_message(message) for message in task.messages],
        "fields": dict(task.fields),
    }


def written_call(call: ToolCall) -> dict[str, object]:
    """Returns a call in OpenAI's format."""
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _written_content(message: Message) -> str | list[dict[str, object]]:
    if not message.images:
        return message.content
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image_url",
            "image_url": {"url": f"data:{part.mime};base64,{base64.b64encode(part.data).decode()}"},
        }
        for part in message.parts
    ]


def loads(text: str | bytes) -> object:
    """Parses JSON; refuses lone surrogates and non-finite numbers, which Python accepts.

    Raises:
        ValueError: The text is not JSON.
        RecursionError: The JSON is nested too deeply.
    """
    data: object = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    if _SURROGATE.search(text if isinstance(text, bytes) else text.encode()):
        json.dumps(data, ensure_ascii=False).encode()
    return data


def read_object(body: bytes) -> dict[str, object]:
    """Parses a JSON object.

    Raises:
        ApiError: The body is not a JSON object, or has more than `MAX_VALUES`.
    """
    _check_values(body, "the request has")
    try:
        data = loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_value("body", f"it is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_value("body", "it must be a JSON object")
    return data


def read_given(body: bytes) -> dict[str, object]:
    """Parses a JSON object without its keys that are null: clients send these for "not given".

    Raises:
        ApiError: See `read_object`.
    """
    return {key: value for key, value in read_object(body).items() if value is not None}


def _check_values(text: bytes, who: str) -> None:
    if has_more_values(text, MAX_VALUES):
        raise ApiError(
            f"{who} more than {MAX_VALUES} JSON values", status=413, code="request_too_large"
        )


def _arguments(messages: Sequence[object]) -> Iterator[str]:
    """Yields the arguments of all calls, as far as these have the right form."""
    for message in messages:
        match message:
            case {"tool_calls": [*calls]}:
                for call in calls:
                    match call:
                        case {"function": {"arguments": str(text)}}:
                            yield text


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is not a JSON value")


def _finite(number: str) -> float:
    if math.isinf(value := float(number)):
        raise ValueError(f"{number[:40]} is too large for a number")
    return value


def _message(value: object, place: str, allowed: Allowances) -> Message:
    if not isinstance(value, dict):
        raise bad_value(place, "it must be an object")
    named = value.get("role")
    role = _ROLES.get(named) if isinstance(named, str) else None
    if role is None:
        raise bad_value(f"{place}.role", f"it must be one of {', '.join(_ROLES)}")
    for name, entry in value.items():
        if name in _KEYS[role] or is_absent(entry):
            continue
        if name in _CONTENT:
            raise unsupported(
                f"{place}.{name}", f"this is not supported in a {role} message; leave it out"
            )
        allowed.unread_key(f"{place}.{name}")
    content, images = _content(value.get("content"), f"{place}.content", allowed, role=role)
    try:
        return Message(
            role=role,
            content=content,
            images=images,
            tool_calls=_calls(value.get("tool_calls"), f"{place}.tool_calls", allowed),
            tool_call_id=_text(value, "tool_call_id", place),
            name=_text(value, "name", place) if role == "tool" else None,
            reasoning=_text(value, "reasoning_content", place) or _text(value, "reasoning", place),
        )
    except ValueError as error:
        raise bad_value(place, str(error)) from None


def _content(
    value: object, place: str, allowed: Allowances, *, role: Role
) -> tuple[str, tuple[Image, ...]]:
    match value:
        case str():
            return value, ()
        case None if role == "assistant":
            return "", ()
        case list():
            parts = [
                _part(entry, f"{place}[{i}]", allowed, role=role) for i, entry in enumerate(value)
            ]
            images = tuple(part for part in parts if isinstance(part, Image))
            texts = (IMAGE_MARK if isinstance(part, Image) else part for part in parts)
            return "".join(texts), images
        case _:
            raise bad_value(place, "it must be a string or a list of parts")


def _part(value: object, place: str, allowed: Allowances, *, role: Role) -> str | Image:
    if not isinstance(value, dict):
        raise bad_value(place, "it must be an object")
    match value.get("type"):
        case "text":
            count_unread(value, ("type", "text"), place, allowed)
            if not isinstance(text := value.get("text"), str):
                raise bad_value(f"{place}.text", "it must be a string")
            return text
        case "image_url" if role != "assistant":
            count_unread(value, ("type", "image_url"), place, allowed)
            source = value.get("image_url")
            if not isinstance(source, dict):
                raise bad_value(f"{place}.image_url", "it must be an object")
            if source.get("detail") == "auto":
                source = {"url": source.get("url")}
            _only(source, ("url",), f"{place}.image_url")
            return read_image(source.get("url"), f"{place}.image_url.url")
        case kind:
            raise unsupported(f"{place}.type", f"{kind!r} is not supported in a {role} message")


def read_image(url: object, place: str) -> Image:
    """Parses a `data:` address of an image.

    Raises:
        ApiError: It is another address, or no image.
    """
    head, comma, data = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise unsupported(place, "only data:image/...;base64,... is supported: nothing is fetched")
    try:
        decoded = base64.b64decode(data, validate=True)
        return Image(data=decoded, mime=head.removeprefix("data:").removesuffix(";base64"))
    except (ValueError, binascii.Error) as error:
        raise bad_value(place, str(error)) from None


def _calls(value: object, place: str, allowed: Allowances) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_value(place, "it must be a list")
    return tuple(_call(entry, f"{place}[{i}]", allowed) for i, entry in enumerate(value))


def _call(value: object, place: str, allowed: Allowances) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict):
        raise bad_value(place, "it must be an object with a function")
    for known, where, entries in (
        (("id", "type", "function", "index"), place, value),
        (("name", "arguments"), f"{place}.function", function),
    ):
        count_unread(entries, known, where, allowed)
    if value.get("type", "function") != "function":
        raise unsupported(f"{place}.type", "only function calls are supported")
    call_id, name, text = value.get("id"), function.get("name"), function.get("arguments")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(text, str):
        raise bad_value(place, "id, function.name and function.arguments must be strings")
    arguments = read_arguments(text, f"{place}.function.arguments")
    return ToolCall(id=call_id, name=name, arguments=arguments)


def read_arguments(text: str, place: str) -> dict[str, object]:
    """Parses the arguments of a call.

    Raises:
        ApiError: They are not a JSON object.
    """
    try:
        arguments = loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise bad_value(place, f"it is not JSON: {error}") from None
    if not isinstance(arguments, dict):
        raise bad_value(place, "it must be a JSON object")
    return arguments


def _text(value: Mapping[str, object], name: str, place: str) -> str | None:
    text = value.get(name)
    if text is not None and not isinstance(text, str):
        raise bad_value(f"{place}.{name}", "it must be a string")
    return text


def _only(value: Mapping[str, object], known: Sequence[str], place: str) -> None:
    for name, entry in value.items():
        if name not in known and not is_absent(entry):
            raise unsupported(f"{place}.{name}", "this is not supported; leave it out")


def count_unread(
    value: Mapping[str, object], known: Sequence[str], place: str, allowed: Allowances
) -> None:
    """Counts the keys of a part of a request that nothing reads, such as `cache_control`."""
    for name, entry in value.items():
        if name not in known and not is_absent(entry) and entry is not False:
            allowed.unread_key(f"{place}.{name}")


def is_absent(entry: object) -> bool:
    """Returns whether a value is empty, which counts as absent."""
    return entry in (None, [], "", {})
