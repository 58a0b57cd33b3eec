"""Parses requests of Anthropic's Messages API, and of its `count_tokens`.

Invariant: as in `chat_request`: pure, and nothing is ignored silently. Fields of coding agents that
have no use in training (`cache_control`, `thinking`, signatures, beta features) are counted.

- `system` is the first message. Text blocks are joined without separator.
- The `tool_result` blocks of a user message are tool messages, before or after its other blocks as
  they come. `is_error` is only counted: the content describes the error.
- `thinking` blocks of the assistant are its reasoning.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.apis.common import (
    AgentRequest,
    constrained_choice,
    flag,
    integer,
    number,
    read_tool,
    read_tools,
    show,
    single_call,
    stop_strings,
    tool_entries,
)
from treadle.agent_loop.proxy.errors import bad_value, unsupported
from treadle.agent_loop.proxy.messages import (
    check_last,
    count_unread,
    is_absent,
    read_given,
    read_image,
)
from treadle.agent_loop.types import IMAGE_MARK, Image, Message, ToolCall, ToolSpec

_NO_EFFECT = ("model", "metadata", "service_tier", "inference_geo")
_COUNTED = ("thinking", "cache_control", "context_management", "betas", "container", "speed")
_CONSTRAINTS = ("output_config", "output_format")
_USED = (
    *("messages", "system", "tools", "tool_choice", "stream", "max_tokens", "stop_sequences"),
    *("temperature", "top_p"),
)


def read_anthropic_request(body: bytes, allowed: Allowances) -> AgentRequest:
    """Parses a request's body.

    Args:
        allowed: Counts what is ignored in the request.

    Raises:
        ApiError: The request cannot be answered; the message names the cause.
    """
    given = read_given(body)
    _check_names(given, allowed)
    tools = read_tools(
        tool_entries(_typed(given.get("tools", []))), lambda value, at: _tool(value, at, allowed)
    )
    _check_tool_choice(given.get("tool_choice", {"type": "auto"}), tools, allowed)
    return AgentRequest(
        messages=_messages(given, allowed),
        tools=tools,
        max_tokens=integer(given, "max_tokens", low=1, high=2**31 - 1),
        temperature=number(given, "temperature", low=0.0, high=100.0),
        top_p=number(given, "top_p", low=0.0, high=1.0, open_low=True),
        stop=stop_strings(given.get("stop_sequences", []), "stop_sequences"),
        calls=allowed.calls,
        stream=flag(given, "stream"),
    )


def _check_names(given: Mapping[str, object], allowed: Allowances) -> None:
    for name, value in given.items():
        if name in _USED or name in _NO_EFFECT:
            continue
        if name in _COUNTED:
            allowed.unread_key(name)
        elif name in _CONSTRAINTS:
            form = value.get("format") if isinstance(value, dict) and "type" not in value else value
            if not is_absent(form):
                allowed.constraint(
                    "response_format",
                    name,
                    f"{show(form)} would constrain the sampling; leave it out",
                )
            else:
                allowed.unread_key(name)
        else:
            raise unsupported(name, "this parameter is not supported; leave it out")


def _typed(value: object) -> object:
    """Returns tools with the type of a function, which Anthropic leaves out or calls custom."""
    if not isinstance(value, list):
        return value
    return [
        {**tool, "type": "function"}
        if isinstance(tool, dict) and tool.get("type") in (None, "custom")
        else tool
        for tool in value
    ]


def _tool(value: Mapping[str, object], place: str, allowed: Allowances) -> ToolSpec:
    known = ("type", "name", "description", "input_schema", "strict")
    count_unread(value, known, place, allowed)
    return read_tool(value, place, allowed, schema="input_schema")


def _check_tool_choice(choice: object, tools: Sequence[ToolSpec], allowed: Allowances) -> None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or kind not in ("auto", "any", "tool", "none"):
        raise bad_value("tool_choice", "its type must be auto, any, tool or none")
    if choice.get("disable_parallel_tool_use"):
        single_call(
            allowed,
            "tool_choice.disable_parallel_tool_use",
            "true would constrain the sampling; leave it out",
            tools=tools,
        )
    if kind == "auto" or (kind == "none" and not tools):
        return
    hint = "leave the tools out" if kind == "none" else 'set its type to "auto"'
    name = choice.get("name") if kind == "tool" else None
    constrained_choice(choice, hint, allowed, tools, required=kind != "none", name=name)


def _messages(given: Mapping[str, object], allowed: Allowances) -> tuple[Message, ...]:
    value = given.get("messages")
    if not isinstance(value, list) or not value:
        raise bad_value("messages", "it must be a list with at least one message")
    messages: list[Message] = []
    if not is_absent(system := given.get("system")):
        text, _ = _Blocks(allowed).text(system, "system")
        messages.append(Message(role="system", content=text))
    for index, entry in enumerate(value):
        place = f"messages[{index}]"
        if not isinstance(entry, dict) or entry.get("role") not in ("user", "assistant", "system"):
            raise bad_value(place, "it must be an object with the role user or assistant")
        count_unread(entry, ("role", "content"), place, allowed)
        blocks, at = _Blocks(allowed), f"{place}.content"
        try:
            if entry["role"] == "assistant":
                messages.append(blocks.assistant(entry.get("content"), at))
            else:
                messages += blocks.user(entry.get("content"), at, role=entry["role"])
        except ValueError as error:  # Of a `Message`.
            raise bad_value(place, str(error)) from None
    check_last(messages, f"messages[{len(value) - 1}]")
    return tuple(messages)


class _Blocks:
    """Parses the content of one message."""

    def __init__(self, allowed: Allowances) -> None:
        self._allowed = allowed

    def text(self, value: object, place: str) -> tuple[str, tuple[Image, ...]]:
        """Parses a string, or blocks of text and images."""
        if isinstance(value, str):
            return value, ()
        texts, images = [], []
        for block, at in self._list(value, place):
            part = self._part(block, at)
            if isinstance(part, Image):
                images.append(part)
            texts.append(IMAGE_MARK if isinstance(part, Image) else part)
        return "".join(texts), tuple(images)

    def user(self, value: object, place: str, *, role: Literal["user", "system"]) -> list[Message]:
        """Parses a user's message, which may have results of tools."""
        if isinstance(value, str):
            return [Message(role=role, content=value)]
        messages: list[Message] = []
        run: list[object] = []

        def close() -> None:
            if run:
                content, images = self.text(run, place)
                messages.append(Message(role=role, content=content, images=images))
                run.clear()

        for block, at in self._list(value, place):
            if block.get("type") != "tool_result":
                run.append(block)
                continue
            close()
            count_unread(block, ("type", "tool_use_id", "content"), at, self._allowed)
            if not isinstance(call_id := block.get("tool_use_id"), str):
                raise bad_value(f"{at}.tool_use_id", "it must be a string")
            content, images = self.text(block.get("content") or "", f"{at}.content")
            messages.append(
                Message(role="tool", content=content, images=images, tool_call_id=call_id)
            )
        close()
        return messages

    def assistant(self, value: object, place: str) -> Message:
        """Parses a turn of the assistant."""
        if isinstance(value, str):
            return Message(role="assistant", content=value)
        texts, thoughts, calls = [], [], []
        for block, at in self._list(value, place):
            match block.get("type"):
                case "tool_use":
                    calls.append(self._call(block, at))
                case "thinking":
                    count_unread(block, ("type", "thinking"), at, self._allowed)
                    if not isinstance(thought := block.get("thinking"), str):
                        raise bad_value(f"{at}.thinking", "it must be a string")
                    thoughts.append(thought)
                case "redacted_thinking":
                    self._allowed.unread_key(at)
                case "image":
                    raise unsupported(f"{at}.type", "an assistant message cannot have images")
                case _:
                    texts.append(str(self._part(block, at)))
        return Message(
            role="assistant",
            content="".join(texts),
            tool_calls=tuple(calls),
            reasoning="".join(thoughts) or None,
        )

    def _list(self, value: object, place: str) -> list[tuple[dict[str, object], str]]:
        if not isinstance(value, list):
            raise bad_value(place, "it must be a string or a list of blocks")
        for index, block in enumerate(value):
            if not isinstance(block, dict):
                raise bad_value(f"{place}[{index}]", "it must be an object")
        return [(block, f"{place}[{index}]") for index, block in enumerate(value)]

    def _part(self, block: Mapping[str, object], place: str) -> str | Image:
        match block.get("type"):
            case "text":
                count_unread(block, ("type", "text"), place, self._allowed)
                if not isinstance(text := block.get("text"), str):
                    raise bad_value(f"{place}.text", "it must be a string")
                return text
            case "image":
                count_unread(block, ("type", "source"), place, self._allowed)
                source = block.get("source")
                if not isinstance(source, dict) or source.get("type") != "base64":
                    raise unsupported(f"{place}.source", "only base64 is supported")
                if not isinstance(source.get("data"), str):
                    raise bad_value(f"{place}.source.data", "it must be a string")
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
                return read_image(url, f"{place}.source")
            case kind:
                raise unsupported(f"{place}.type", f"{show(kind)} is not supported here")

    def _call(self, block: Mapping[str, object], place: str) -> ToolCall:
        count_unread(block, ("type", "id", "name", "input"), place, self._allowed)
        call_id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(given, dict)):
            raise bad_value(place, "id and name must be strings, and input an object")
        return ToolCall(id=call_id, name=name, arguments=given)
