"""Parses OpenAI's chat completion request.

Invariant: pure, and nothing is ignored silently. A parameter is used, or has no effect by OpenAI's
own definition (`model`, `user`, `metadata`), or has the value that means the same as leaving it out
(`NEUTRAL`), or is let pass and counted (`allowances.py`). Any other one is an `ApiError` that names
it. null means absent. No address in a message is ever fetched.

- `tool_choice` other than "auto", `strict`, `parallel_tool_calls: false` and response formats would
  constrain the sampling. They are refused, or not enforced.
- `developer` messages are system messages. Texts in parts are joined without separator.
- Reasoning may come back as `reasoning_content` or `reasoning`.
- `model` may be any name: the session's address determines the model.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from treadle.agent_loop.proxy.allowances import Allowances
from treadle.agent_loop.proxy.errors import bad_value, unsupported
from treadle.agent_loop.proxy.messages import read_messages, read_object
from treadle.agent_loop.types import Message, ToolSpec

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "n": (1,),
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

_NO_EFFECT = ("model", "user", "metadata", "safety_identifier", "prompt_cache_key")
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
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A parsed request. None means not specified.

    Attributes:
        messages: The conversation.
        tools: Shown to the model.
        max_tokens: At least 1.
        temperature: At least 0.
        top_p: In (0, 1].
        seed: At least 0.
        stop: Strings that end the completion.
        logprobs: Whether to return each token's log-probability.
        stream: Whether to answer with server-sent events.
        include_usage: Whether to include the numbers of tokens in the stream.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


def read_request(body: bytes, allowed: Allowances) -> ChatRequest:
    """Parses a request's body.

    Args:
        body: JSON.
        allowed: Takes what is let pass.

    Raises:
        ApiError: The request cannot be answered; the message says why.
    """
    given = {key: value for key, value in read_object(body).items() if value is not None}
    _check_names(given, allowed)
    tools = _tools(given.get("tools", []), allowed)
    _check_tool_choice(given.get("tool_choice", "auto"), tools, allowed)
    stream = _flag(given, "stream")
    return ChatRequest(
        messages=read_messages(given.get("messages", []), allowed),
        tools=tools,
        max_tokens=_max_tokens(given),
        temperature=_number(given, "temperature", low=0.0, high=100.0),
        top_p=_number(given, "top_p", low=0.0, high=1.0, open_low=True),
        seed=_integer(given, "seed", low=0, high=2**63 - 1),
        stop=_stop(given.get("stop", [])),
        logprobs=_flag(given, "logprobs"),
        stream=stream,
        include_usage=_include_usage(given.get("stream_options"), stream=stream),
    )


def _check_names(given: Mapping[str, object], allowed: Allowances) -> None:
    for name, value in given.items():
        if name in _USED or name in _NO_EFFECT:
            continue
        if name not in NEUTRAL:
            raise unsupported(name, "this parameter is not supported; leave it out")
        if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            accepted = " or ".join(json.dumps(neutral) for neutral in NEUTRAL[name])
            problem = f"{_show(value)} is not supported; leave it out, or set {accepted}"
            if not _is_constraint(name, value):
                raise unsupported(name, problem)
            allowed.constraint(name, name, problem)


def _is_constraint(name: str, value: object) -> bool:
    if name == "parallel_tool_calls":
        return value is False
    formats = ("json_object", "json_schema")
    return name == "response_format" and isinstance(value, dict) and value.get("type") in formats


def _same(value: object, neutral: object) -> bool:
    """Returns whether two values are equal as JSON: true is not 1, but 1.0 is."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def _check_tool_choice(choice: object, tools: Sequence[ToolSpec], allowed: Allowances) -> None:
    if choice == "auto" or (choice == "none" and not tools):
        return
    named = isinstance(choice, dict) and choice.get("type") == "function"
    if choice not in ("none", "required") and not named:
        raise bad_value("tool_choice", "it must be auto, none, required or a function")
    hint = "leave the tools out" if choice == "none" else 'set it to "auto"'
    allowed.constraint(
        "tool_choice",
        "tool_choice",
        f"{_show(choice)} would constrain the sampling, and the trainer would treat constrained "
        f"tokens as the policy's own: {hint}",
    )


def _tools(value: object, allowed: Allowances) -> tuple[ToolSpec, ...]:
    if not isinstance(value, list):
        raise bad_value("tools", "it must be a list")
    specs = [_tool(entry, f"tools[{i}]", allowed) for i, entry in enumerate(value)]
    counts = Counter(spec.name for spec in specs)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise bad_value("tools", f"there is more than one tool with the name {twice[0]!r}")
    return tuple(specs)


def _tool(value: object, place: str, allowed: Allowances) -> ToolSpec:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise unsupported(f"{place}.type", 'only {"type": "function"} is supported')
    function = value.get("function")
    if not isinstance(function, dict):
        raise bad_value(f"{place}.function", "it must be an object")
    _only(value, ("type", "function"), place)
    _only(function, ("name", "description", "parameters", "strict"), f"{place}.function")
    if function.get("strict"):
        allowed.constraint(
            "strict",
            f"{place}.function.strict",
            "true would constrain the sampling: leave it out, and check the arguments",
        )
    name, description = function.get("name"), function.get("description") or ""
    parameters = function.get("parameters")
    if not isinstance(name, str) or not name:
        raise bad_value(f"{place}.function.name", "it must be a string")
    if not isinstance(description, str):
        raise bad_value(f"{place}.function.description", "it must be a string")
    if parameters is None:
        return ToolSpec(name=name, description=description)
    if not isinstance(parameters, dict):
        raise bad_value(f"{place}.function.parameters", "it must be a JSON Schema object")
    return ToolSpec(name=name, description=description, parameters=parameters)


def _max_tokens(given: Mapping[str, object]) -> int | None:
    names = [n for n in ("max_completion_tokens", "max_tokens") if n in given]
    values = [_integer(given, name, low=1, high=2**31 - 1) for name in names]
    if len(set(values)) > 1:
        raise bad_value(
            "max_tokens", f"it is {values[1]}, but max_completion_tokens is {values[0]}"
        )
    return values[0] if values else None


def _stop(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise bad_value("stop", "it must be a string or a list of strings, none of them empty")
    return tuple(texts)


def _include_usage(value: object, *, stream: bool) -> bool:
    if value is None:
        return False
    if not stream:
        raise bad_value("stream_options", "it is for requests with stream")
    if not isinstance(value, dict):
        raise bad_value("stream_options", "it must be an object")
    _only(value, ("include_usage",), "stream_options")
    return _flag(value, "include_usage", place="stream_options.")


def _flag(given: Mapping[str, object], name: str, *, place: str = "") -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad_value(place + name, f"it must be true or false, not {_show(value)}")
    return value


def _number(
    given: Mapping[str, object], name: str, *, low: float, high: float, open_low: bool = False
) -> float | None:
    if (value := given.get(name)) is None:
        return None
    accepted = f"a number from {low:g} to {high:g}" + (f", but not {low:g}" if open_low else "")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_value(name, f"it must be {accepted}, not {_show(value)}")
    if open_low and value == low:
        raise bad_value(name, f"it must be {accepted}, not {_show(value)}")
    return float(value)


def _integer(given: Mapping[str, object], name: str, *, low: int, high: int) -> int | None:
    if (value := given.get(name)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_value(name, f"it must be a whole number of at least {low}, not {_show(value)}")
    return value


def _only(value: Mapping[str, object], known: Sequence[str], place: str) -> None:
    for name, entry in value.items():
        if entry is not None and name not in known:
            raise unsupported(f"{place}.{name}", "this is not supported; leave it out")


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
