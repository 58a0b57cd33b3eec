"""Parses requests of OpenAI's Responses API.

Invariant: as in `chat_request`: pure, and nothing is ignored silently. Keys without a meaning for a
policy that is trained (`reasoning`, `include`, the verbosity of `text`) are counted.

- `input` is the whole conversation, or what follows `previous_response_id`. `instructions` are a
  system message before all of it, and belong to this request only.
- Reasoning, text and calls that follow each other are one turn of the assistant.
- Tools are functions, also those in namespaces. The hosted ones, as a search, are refused by their
  type, or left out and counted as constraints are; all others are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.apis.common import (
    AgentRequest,
    check_tool_choice,
    flag,
    integer,
    number,
    only,
    read_tool,
    read_tools,
    response_schema,
    same,
    show,
    single_call,
    tool_entries,
)
from treadle.agent_loop.proxy.errors import ApiError, bad_value, unsupported
from treadle.agent_loop.proxy.messages import (
    check_arguments,
    check_last,
    count_unread,
    is_absent,
    read_arguments,
    read_given,
    read_image,
)
from treadle.agent_loop.types import IMAGE_MARK, Image, Message, Role, ToolCall, ToolSpec

_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "background": (False,),
        "parallel_tool_calls": (True,),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
)
_NO_EFFECT = (
    *("model", "user", "metadata", "client_metadata", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
_COUNTED = ("reasoning", "stream_options")
_USED = (
    *("input", "instructions", "previous_response_id", "store", "include", "text"),
    *("tools", "tool_choice", "stream", "max_output_tokens", "temperature", "top_p"),
)
# Tools that OpenAI runs itself.
_HOSTED = (
    *("code_interpreter", "file_search", "image_generation", "mcp"),
    *("web_search", "web_search_preview"),
)
_LOGPROBS = "message.output_text.logprobs"
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def read_responses_request(
    body: bytes, allowed: Allowances, answered: Mapping[str, tuple[Message, ...]]
) -> AgentRequest:
    """Parses a request's body.

    Args:
        allowed: Counts what is ignored in the request.
        answered: The conversations up to earlier answers, by the answers' ids.

    Raises:
        ApiError: The request cannot be answered; the message names the cause.
    """
    given = read_given(body)
    _check_names(given, allowed)
    schema = _text_schema(given.get("text", {}), allowed, given.get("tools"))
    entries, namespaces = _functions(given.get("tools", []), allowed)
    tools = read_tools(entries, lambda value, at: _tool(value, at, allowed))
    check_tool_choice(given.get("tool_choice", "auto"), tools, allowed)
    instructions = _instructions(given.get("instructions"))
    history = _history(given.get("previous_response_id"), answered)
    messages = (*instructions, *history, *_Input(allowed).read(given.get("input")))
    if not messages:
        raise bad_value("input", "it must be a string, or a list with at least one item")
    check_last(messages, "input")
    return AgentRequest(
        messages=messages,
        num_instructions=len(instructions),
        store=given.get("store") is not False,
        tools=tools,
        namespaces=namespaces,
        max_tokens=integer(given, "max_output_tokens", low=1, high=2**31 - 1),
        temperature=number(given, "temperature", low=0.0, high=100.0),
        top_p=number(given, "top_p", low=0.0, high=1.0, open_low=True),
        logprobs=_include(given.get("include", []), allowed),
        response_schema=schema,
        calls=allowed.calls,
        stream=flag(given, "stream"),
    )


def _check_names(given: Mapping[str, object], allowed: Allowances) -> None:
    for name, value in given.items():
        if name in _USED or name in _NO_EFFECT:
            continue
        if name in _COUNTED:
            if not is_absent(value):
                allowed.unread_key(name)
            continue
        if name not in _NEUTRAL:
            raise unsupported(name, "this parameter is not supported; leave it out")
        if not any(same(value, neutral) for neutral in _NEUTRAL[name]):
            accepted = " or ".join(json.dumps(neutral) for neutral in _NEUTRAL[name])
            problem = f"{show(value)} is not supported; leave it out, or set {accepted}"
            if name != "parallel_tool_calls" or value is not False:
                raise unsupported(name, problem)
            single_call(allowed, name, problem, tools=given.get("tools"))


def _text_schema(value: object, allowed: Allowances, tools: object) -> str | None:
    """Checks `text`; returns the schema of its format, if it is to be enforced."""
    if not isinstance(value, dict):
        raise bad_value("text", "it must be an object")
    only(value, ("format", "verbosity"), "text")
    if value.get("verbosity") is not None:
        allowed.unread_key("text.verbosity")
    form = value.get("format") or {"type": "text"}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("json_object", "json_schema"):
        problem = f"{show(form)} would constrain the sampling; leave it out"
        schema = form.get("schema") if kind == "json_schema" else None
        return response_schema(form, "text.format", problem, allowed, schema=schema, tools=tools)
    if kind != "text":
        raise bad_value("text.format", "its type must be text, json_object or json_schema")
    return None


def _include(value: object, allowed: Allowances) -> bool:
    if not isinstance(value, list):
        raise bad_value("include", "it must be a list")
    for entry in value:
        if entry != _LOGPROBS:
            allowed.unread_key("include")
    return _LOGPROBS in value


def _functions(
    value: object, allowed: Allowances
) -> tuple[list[tuple[str, object]], dict[str, str]]:
    """Returns the functions with their places, and the namespaces of those that have one.

    A namespace is flattened: the model is shown the names of its functions alone.
    """
    entries: list[tuple[str, object]] = []
    namespaces: dict[str, str] = {}
    for place, entry in tool_entries(value):
        kind = entry.get("type") if isinstance(entry, dict) else None
        if kind in _HOSTED:
            problem = f"{show(kind)} would run at a provider, and here is none; leave it out"
            allowed.constraint("hosted_tools", f"{place}.type", problem)
        elif isinstance(entry, dict) and kind == "namespace":
            only(entry, ("type", "name", "description", "tools"), place)
            name, functions = entry.get("name"), entry.get("tools")
            if not isinstance(name, str) or not isinstance(functions, list):
                raise bad_value(place, "name must be a string, and tools a list")
            if not is_absent(entry.get("description")):
                allowed.unread_key(f"{place}.description")
            entries += [(f"{place}.tools[{i}]", function) for i, function in enumerate(functions)]
            named = (each.get("name") for each in functions if isinstance(each, dict))
            namespaces |= {each: name for each in named if isinstance(each, str)}
        else:
            entries.append((place, entry))
    return entries, namespaces


def _tool(value: Mapping[str, object], place: str, allowed: Allowances) -> ToolSpec:
    known = ("type", "name", "description", "parameters", "strict")
    count_unread(value, known, place, allowed)
    return read_tool(value, place, allowed)


def _instructions(value: object) -> tuple[Message, ...]:
    if value is None or value == "":
        return ()
    if not isinstance(value, str):
        raise bad_value("instructions", "it must be a string")
    return (Message(role="system", content=value),)


def _history(previous: object, answered: Mapping[str, tuple[Message, ...]]) -> tuple[Message, ...]:
    if previous is None:
        return ()
    if not isinstance(previous, str) or previous not in answered:
        raise ApiError(
            f"previous_response_id: this session has no stored answer {show(previous)}",
            status=404,
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return answered[previous]


@dataclass(slots=True)
class _Turn:
    """A turn of the assistant, as far as its items have come.

    Attributes:
        stage: The last item so far: 0 reasoning, 1 text, 2 a call.
    """

    stage: int = 0
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role="assistant",
            content="".join(self.content),
            tool_calls=tuple(self.calls),
            reasoning="".join(self.reasoning) or None,
        )


class _Input:
    """Parses `input`, item by item."""

    def __init__(self, allowed: Allowances) -> None:
        self._allowed = allowed
        self._messages: list[Message] = []
        self._turn: _Turn | None = None

    def read(self, value: object) -> tuple[Message, ...]:
        if value is None:
            return ()
        if isinstance(value, str):
            return (Message(role="user", content=value),)
        if not isinstance(value, list):
            raise bad_value("input", "it must be a string or a list of items")
        texts = [v.get("arguments") for v in value if isinstance(v, dict)]
        check_arguments(text for text in texts if isinstance(text, str))
        for index, item in enumerate(value):
            self._item(item, f"input[{index}]")
        self._close()
        return tuple(self._messages)

    def _item(self, item: object, place: str) -> None:
        if not isinstance(item, dict):
            raise bad_value(place, "it must be an object")
        match item.get("type", "message"):
            case "message":
                self._message(item, place)
            case "reasoning":
                self._reasoning(item, place)
            case "function_call":
                self._call(item, place)
            case "function_call_output":
                self._output(item, place)
            case kind:
                raise unsupported(f"{place}.type", f"items of type {show(kind)} are not supported")

    def _message(self, item: Mapping[str, object], place: str) -> None:
        count_unread(item, ("type", "role", "content", "id", "status"), place, self._allowed)
        named = item.get("role")
        role = _ROLES.get(named) if isinstance(named, str) else None
        if role is None:
            raise bad_value(f"{place}.role", f"it must be one of {', '.join(_ROLES)}")
        content, images = self._content(item.get("content"), f"{place}.content")
        if role != "assistant":
            self._close()
            self._add(place, role=role, content=content, images=images)
            return
        if images:
            raise unsupported(f"{place}.content", "an assistant message cannot have images")
        self._stage(1).content.append(content)

    def _reasoning(self, item: Mapping[str, object], place: str) -> None:
        count_unread(item, ("type", "id", "summary", "content", "status"), place, self._allowed)
        parts = item.get("content") or item.get("summary") or []
        text, _ = self._content(parts, f"{place}.content")
        self._stage(0).reasoning.append(text)

    def _call(self, item: Mapping[str, object], place: str) -> None:
        known = ("type", "id", "call_id", "name", "namespace", "arguments", "status")
        count_unread(item, known, place, self._allowed)
        call_id, name, text = item.get("call_id"), item.get("name"), item.get("arguments")
        if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(text, str)):
            raise bad_value(place, "call_id, name and arguments must be strings")
        arguments = read_arguments(text, f"{place}.arguments")
        self._stage(2).calls.append(ToolCall(id=call_id, name=name, arguments=arguments))

    def _output(self, item: Mapping[str, object], place: str) -> None:
        count_unread(item, ("type", "id", "call_id", "output", "status"), place, self._allowed)
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            raise bad_value(f"{place}.call_id", "it must be a string")
        content, images = self._content(item.get("output"), f"{place}.output")
        self._close()
        self._add(place, role="tool", content=content, images=images, tool_call_id=call_id)

    def _stage(self, stage: int) -> _Turn:
        """Returns the turn that an item belongs to; one that cannot follow begins the next."""
        turn = self._turn
        if turn is None or stage < turn.stage or (stage == turn.stage == 1):
            self._close()
            turn = self._turn = _Turn()
        turn.stage = stage
        return turn

    def _close(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn.message())
            self._turn = None

    def _add(
        self,
        place: str,
        *,
        role: Role,
        content: str,
        images: tuple[Image, ...],
        tool_call_id: str | None = None,
    ) -> None:
        try:
            message = Message(role=role, content=content, images=images, tool_call_id=tool_call_id)
        except ValueError as error:
            raise bad_value(place, str(error)) from None
        self._messages.append(message)

    def _content(self, value: object, place: str) -> tuple[str, tuple[Image, ...]]:
        if isinstance(value, str):
            return value, ()
        if not isinstance(value, list):
            raise bad_value(place, "it must be a string or a list of parts")
        texts, images = [], []
        for index, part in enumerate(value):
            at = f"{place}[{index}]"
            kind = part.get("type") if isinstance(part, dict) else None
            if not isinstance(part, dict):
                raise bad_value(at, "it must be an object")
            if kind in _TEXTS:
                if not isinstance(text := part.get("text"), str):
                    raise bad_value(f"{at}.text", "it must be a string")
                texts.append(text)
                count_unread(part, ("type", "text", "annotations", "logprobs"), at, self._allowed)
            elif kind == "input_image":
                count_unread(part, ("type", "image_url", "detail", "file_id"), at, self._allowed)
                images.append(read_image(part.get("image_url"), f"{at}.image_url"))
                texts.append(IMAGE_MARK)
            else:
                raise unsupported(f"{at}.type", f"{show(kind)} is not supported")
        return "".join(texts), tuple(images)
