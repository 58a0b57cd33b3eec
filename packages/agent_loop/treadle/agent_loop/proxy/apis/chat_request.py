"""Parses OpenAI's chat completion request.

Invariant: pure, and nothing is ignored silently. A parameter is used, or has no effect by OpenAI's
own definition (`model`, `user`, `metadata`), or has the value that means the same as leaving it out
(`NEUTRAL`), or is let pass and counted (`allowances.py`). Any other one is an `ApiError` that names
it. null means absent. No address in a message is ever fetched.

- `tool_choice` other than "auto", `strict`, `parallel_tool_calls: false` and response formats would
  constrain the sampling. They are refused, or not enforced, or enforced (`AgentConstraints`).
- `developer` messages are system messages. Texts in parts are joined without separator.
- Reasoning may come back as `reasoning_content` or `reasoning`.
- `model` may be any name: the session's address determines the model.
"""

import json
from collections.abc import Mapping
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
    stop_strings,
    tool_entries,
)
from treadle.agent_loop.proxy.errors import bad_value, unsupported
from treadle.agent_loop.proxy.messages import (
    count_unread,
    is_absent,
    read_given,
    read_messages,
)
from treadle.agent_loop.types import ToolSpec

MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's API."""

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "top_logprobs": (0,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "service_tier": ("auto", "default"),
        "store": (False,),
    }
)
"""Parameters that are refused, except for these values, which change nothing."""

_NO_EFFECT = (
    *("model", "user", "metadata", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention"),
)
_COUNTED = ("reasoning_effort", "reasoning", "thinking", "verbosity", "cache_control")
"""How much a provider's model is to think and to say, and what it is to cache."""
_USED = (
    "messages",
    "tools",
    "tool_choice",
    "stream",
    "stream_options",
    "stop",
    "logprobs",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "n",
)


def read_request(body: bytes, allowed: Allowances) -> AgentRequest:
    """Parses a request's body.

    Args:
        allowed: Counts what is ignored in the request.

    Raises:
        ApiError: The request cannot be answered; the message names the cause.
    """
    given = read_given(body)
    schema = _check_names(given, allowed)
    tools = read_tools(
        tool_entries(given.get("tools", [])), lambda value, at: _tool(value, at, allowed)
    )
    check_tool_choice(given.get("tool_choice", "auto"), tools, allowed)
    stream = flag(given, "stream")
    return AgentRequest(
        messages=read_messages(given.get("messages", []), allowed),
        tools=tools,
        max_tokens=_max_tokens(given),
        temperature=number(given, "temperature", low=0.0, high=100.0),
        top_p=number(given, "top_p", low=0.0, high=1.0, open_low=True),
        seed=integer(given, "seed", low=0, high=2**63 - 1),
        stop=stop_strings(given.get("stop", [])),
        logprobs=flag(given, "logprobs"),
        n=integer(given, "n", low=1, high=MAX_CHOICES) or 1,
        response_schema=schema,
        calls=allowed.calls,
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream=stream),
    )


def _check_names(given: Mapping[str, object], allowed: Allowances) -> str | None:
    """Checks all parameters; returns the schema of the text, if it is to be enforced."""
    schema: str | None = None
    for name, value in given.items():
        if name in _USED or name in _NO_EFFECT:
            continue
        if name in _COUNTED:
            if not is_absent(value):
                allowed.unread_key(name)
            continue
        if name not in NEUTRAL:
            raise unsupported(name, "this parameter is not supported; leave it out")
        if not any(same(value, neutral) for neutral in NEUTRAL[name]):
            accepted = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            problem = f"{show(value)} is not supported; leave it out, or set {accepted}"
            if not _is_constraint(name, value):
                raise unsupported(name, problem)
            if name != "response_format":
                single_call(allowed, name, problem, tools=given.get("tools"))
                continue
            inner = value.get("json_schema") if isinstance(value, dict) else None
            given_schema = inner.get("schema") if isinstance(inner, dict) else None
            schema = response_schema(
                value, name, problem, allowed, schema=given_schema, tools=given.get("tools")
            )
    return schema


def _is_constraint(name: str, value: object) -> bool:
    if name == "parallel_tool_calls":
        return value is False
    formats = ("json_object", "json_schema")
    return name == "response_format" and isinstance(value, dict) and value.get("type") in formats


def _tool(value: Mapping[str, object], place: str, allowed: Allowances) -> ToolSpec:
    function = value.get("function")
    if not isinstance(function, dict):
        raise bad_value(f"{place}.function", "it must be an object")
    count_unread(value, ("type", "function"), place, allowed)
    known = ("name", "description", "parameters", "strict")
    count_unread(function, known, f"{place}.function", allowed)
    return read_tool(function, f"{place}.function", allowed)


def _max_tokens(given: Mapping[str, object]) -> int | None:
    names = [n for n in ("max_completion_tokens", "max_tokens") if n in given]
    values = [integer(given, name, low=1, high=2**31 - 1) for name in names]
    if len(set(values)) > 1:
        raise bad_value(
            "max_tokens", f"it is {values[1]}, but max_completion_tokens is {values[0]}"
        )
    return values[0] if values else None


def _include_usage(value: object, *, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise bad_value("stream_options", "it is for requests with stream")
    if not isinstance(value, dict):
        raise bad_value("stream_options", "it must be an object")
    only(value, ("include_usage",), "stream_options")
    return flag(value, "include_usage", place="stream_options.")
