"""The common part of the endpoint's APIs: the request that all become, and its values.

Invariant: pure. Each API reads its requests into an `AgentRequest` and writes its answers from
turns; nothing else of the endpoint knows which API an agent speaks.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from treadle.agent_loop.capture import CapturedTurn, TurnDelta
from treadle.agent_loop.proxy.allowances import AgentConstraints, Allowances, CallRules
from treadle.agent_loop.proxy.errors import ApiError, bad_value, unsupported
from treadle.agent_loop.types import Message, ToolSpec

_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 1024
"""Each is looked for in the whole text with every token that is streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A parsed request. None means not specified.

    Attributes:
        namespaces: Namespaces of tools that the request groups (Responses API), by the tool's name.
        max_tokens: A number of at least 1.
        temperature: A number of at least 0.
        top_p: A number in (0, 1].
        seed: A number of at least 0.
        stop: Strings that end the completion.
        logprobs: Whether to return each token's log-probability.
        n: Number of answers; at least 1.
        stream: Whether to answer with server-sent events.
        num_instructions: Number of leading messages that a later request does not continue, because
            it brings its own (instructions of the Responses API).
        response_schema: JSON Schema of the text, as JSON, where it is to be enforced.
        calls: Rules for the calls, which are enforced.
        prompt_ids: The prompt as ids, instead of messages.
        stop_token_ids: Ids that end the completion, besides the renderer's.
        store: Whether a later request may continue this one by its id.
        include_usage: Whether to include the numbers of tokens in the stream.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    namespaces: Mapping[str, str] = field(default_factory=dict)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    num_instructions: int = 0
    response_schema: str | None = None
    calls: CallRules = field(default_factory=CallRules)
    prompt_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    store: bool = False


class WholeAnswer(Protocol):
    """Writes the answer to one request as its API has it."""

    @property
    def id(self) -> str:
        """Id of the answer; unique in its session."""
        ...

    def whole(self, turns: Sequence[CapturedTurn]) -> dict[str, object]:
        """Returns the JSON object of an answer that is not a stream."""
        ...


@runtime_checkable
class AnswerWriter(WholeAnswer, Protocol):
    """Writes an answer also as a stream of events."""

    def begin(self) -> Iterator[bytes]:
        """Yields the events before the first delta."""
        ...

    def delta(self, index: int, delta: TurnDelta) -> Iterator[bytes]:
        """Yields the events of what has been added to the turn with this index."""
        ...

    def end(self, turns: Sequence[CapturedTurn]) -> Iterator[bytes]:
        """Yields the events after the last delta: calls, why the turns ended, usage."""
        ...

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yields the events that end a stream whose completion failed."""
        ...


def event(data: Mapping[str, object], *, name: str | None = None) -> bytes:
    """Returns a server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def tool_entries(value: object) -> list[tuple[str, object]]:
    """Returns the entries of a request's `tools`, each with its place.

    Raises:
        ApiError: It is no list.
    """
    if not isinstance(value, list):
        raise bad_value("tools", "it must be a list")
    return [(f"tools[{index}]", entry) for index, entry in enumerate(value)]


def read_tools(
    entries: Iterable[tuple[str, object]], read: Callable[[Mapping[str, object], str], ToolSpec]
) -> tuple[ToolSpec, ...]:
    """Parses function tools.

    Args:
        read: Parses one of them, given its place.

    Raises:
        ApiError: One is no function, or two have one name.
    """
    specs = []
    for place, entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or kind != "function":
            problem = f'{show(kind)} is not supported, only "function"; switch it off in the agent'
            raise unsupported(f"{place}.type", problem)
        specs.append(read(entry, place))
    counts = Counter(spec.name for spec in specs)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise bad_value("tools", f"there is more than one tool with the name {twice[0]!r}")
    return tuple(specs)


def read_tool(
    value: Mapping[str, object], place: str, allowed: Allowances, *, schema: str = "parameters"
) -> ToolSpec:
    """Parses name, description, schema and `strict` of a function.

    Args:
        place: Its place in the request.
        allowed: Takes `strict`, if it is let pass.
        schema: Under which name it has the JSON Schema of its arguments.
    """
    strict = bool(value.get("strict"))
    if strict and not allowed.calls_enforced:
        allowed.constraint(
            "strict",
            f"{place}.strict",
            "true would constrain the sampling: leave it out, and check the arguments",
        )
    name, description = value.get("name"), value.get("description") or ""
    parameters = value.get(schema)
    if not isinstance(name, str) or not name:
        raise bad_value(f"{place}.name", "it must be a string, and not empty")
    if strict and allowed.calls_enforced:
        allowed.calls.strict.add(name)
    if not isinstance(description, str):
        raise bad_value(f"{place}.description", "it must be a string")
    if parameters is None:
        return ToolSpec(name=name, description=description)
    if not isinstance(parameters, dict):
        raise bad_value(f"{place}.{schema}", "it must be a JSON Schema object")
    return ToolSpec(name=name, description=description, parameters=parameters)


def check_tool_choice(choice: object, tools: Sequence[ToolSpec], allowed: Allowances) -> None:
    """Checks a `tool_choice` of OpenAI's APIs: "auto", or a constraint."""
    if choice == "auto" or (choice == "none" and not tools):
        return
    named = isinstance(choice, dict) and choice.get("type") == "function"
    if choice not in ("none", "required") and not named:
        raise bad_value("tool_choice", "it must be auto, none, required or a function")
    hint = "leave the tools out" if choice == "none" else 'set it to "auto"'
    # Chat completions have the name below "function", the Responses API beside it.
    inner = choice.get("function", choice) if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    constrained_choice(choice, hint, allowed, tools, required=choice != "none", name=name)


def constrained_choice(
    choice: object,
    hint: str,
    allowed: Allowances,
    tools: Sequence[ToolSpec],
    *,
    required: bool,
    name: object,
) -> None:
    """Enforces a choice of tools that constrains the sampling, or lets it pass, or refuses it.

    Args:
        hint: The fix, where it is refused.
        required: Whether the choice is that the model calls; else that it does not.
        name: The tool that the model is to call; None for any.

    Raises:
        ApiError: It is refused, or cannot be enforced because there is no such tool.
    """
    if allowed.calls_enforced and required:
        if not tools:
            raise bad_value("tool_choice", f"it is {show(choice)}, and there are no tools")
        if name is not None and name not in {tool.name for tool in tools}:
            raise bad_value("tool_choice", f"there is no tool with the name {show(name)}")
        allowed.calls.required = True
        allowed.calls.only = name if isinstance(name, str) else None
        return
    allowed.constraint(
        "tool_choice",
        "tool_choice",
        f"{show(choice)} would constrain the sampling, and the trainer would treat constrained "
        f"tokens as the policy's own: {hint}",
    )


def flag(given: Mapping[str, object], name: str, *, place: str = "") -> bool:
    """Reads true or false; false if it is absent."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise bad_value(place + name, f"it must be true or false, not {show(value)}")
    return value


def number(
    given: Mapping[str, object], name: str, *, low: float, high: float, open_low: bool = False
) -> float | None:
    """Reads a number within bounds; None if it is absent."""
    if (value := given.get(name)) is None:
        return None
    accepted = f"a number from {low:g} to {high:g}" + (f", but not {low:g}" if open_low else "")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_value(name, f"it must be {accepted}, not {show(value)}")
    if open_low and value == low:
        raise bad_value(name, f"it must be {accepted}, not {show(value)}")
    return float(value)


def integer(given: Mapping[str, object], name: str, *, low: int, high: int) -> int | None:
    """Reads a whole number within bounds; None if it is absent."""
    if (value := given.get(name)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise bad_value(name, f"it must be a whole number from {low} to {high}, not {show(value)}")
    return value


def only(value: Mapping[str, object], known: Sequence[str], place: str) -> None:
    """Refuses keys with a value that are not known."""
    for name, entry in value.items():
        if entry is not None and name not in known:
            raise unsupported(f"{place}.{name}", "this is not supported; leave it out")


def show(value: object) -> str:
    """Returns a value as short JSON."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def same(value: object, neutral: object) -> bool:
    """Returns whether two values are equal as JSON: true is not 1, but 1.0 is."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def stop_strings(value: object, name: str = "stop") -> tuple[str, ...]:
    """Reads one string or several that end a completion."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(t, str) and t for t in texts):
        raise bad_value(name, "it must be a string or a list of strings, none of them empty")
    if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARACTERS for text in texts):
        raise bad_value(
            name,
            f"at most {_MAX_STOPS} strings of {_MAX_STOP_CHARACTERS} characters are looked for",
        )
    return tuple(texts)


def response_schema(
    form: object,
    place: str,
    problem: str,
    allowed: Allowances,
    *,
    schema: object,
    tools: object,
) -> str | None:
    """Returns the schema of a response format, if it is to be enforced; else as `constraint`.

    Args:
        place: Its place in the request.
        problem: Its problem, where formats are refused.
        allowed: Takes what is let pass.
        schema: Its JSON Schema; None means any JSON.
        tools: Tools of the request. With tools the model may call instead, so that nothing is
            enforced.

    Raises:
        ApiError: It has no schema, or constraints are refused.
    """
    if allowed.constraints is not AgentConstraints.ENFORCE or tools:
        allowed.constraint("response_format", place, problem)
        return None
    if schema is not None and not isinstance(schema, dict):
        raise bad_value(place, f"it must have a JSON Schema: {show(form)}")
    return json.dumps({"type": "object"} if schema is None else schema)


def single_call(allowed: Allowances, param: str, problem: str, *, tools: object) -> None:
    """Enforces that there is at most one call, or lets it pass.

    Args:
        param: Its place in the request.
        problem: Its problem, where it is refused.

    Raises:
        ApiError: It is refused.
    """
    if allowed.calls_enforced and tools:
        allowed.calls.single = True
    else:
        allowed.constraint("parallel_tool_calls", param, problem)
