"""Rows of files -> demonstrations, in verl's columns.

A row has `messages` (role, content, tool_calls, tool_call_id, name, reasoning_content) and may have
`tools` (OpenAI's function schemas) and `images` (see `data.images`). Messages and tools may each be
a JSON text; in Parquet that is the safe form of tools and arguments, as a struct there has the keys
of all rows, with null where a row has none.

Invariant: nothing in these columns is ignored: what is not understood is an error with file,
row and cause. Other columns are not read, which a note says.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop import Message, SetupError, ToolCall, ToolSpec
from treadle.tools.catalog import tool_spec
from treadle.trainer.config.sft import SftDataConfig
from treadle.trainer.data import Row, read_rows
from treadle.trainer.data.errors import nearest
from treadle.trainer.data.images import with_images
from treadle.trainer.data.row_problems import RowProblems
from treadle.trainer.sft.demonstration import Demonstration

__all__ = ["Conversation", "Conversations", "read_conversations"]

_ROLES = ("system", "user", "assistant", "tool")
_KEYS = {
    "system": ("content",),
    "user": ("content",),
    "assistant": ("content", "tool_calls", "reasoning_content"),
    "tool": ("content", "tool_call_id", "name"),
}
_SETTING = "enable_thinking"
"""A column by which verl sets a variable of the template row by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A row's demonstration; `place` names its file and line."""

    place: str
    demonstration: Demonstration


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The conversations of a split, in the order of the rows; `notes` are printed at the start."""

    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...]


def read_conversations(
    paths: Sequence[Path], data: SftDataConfig, *, split: str, limit: int | None = None
) -> Conversations:
    """Reads the conversations of all files, in order.

    Args:
        paths: As of `read_rows`.
        data: Names the columns.
        split: Names the rows in messages: "train" or "val".
        limit: Maximum number of rows. None: read all.

    Raises:
        DataError: A file or a row cannot be used.
        SeveralProblems: More than one of these.
    """
    rows = read_rows(paths, required=(data.messages_key,), limit=limit)
    read = (data.messages_key, data.tools_key, data.images_key)
    found = RowProblems(f"{split} rows")
    made: list[Conversation] = []
    unread: Counter[str] = Counter()
    for row in rows:
        unread.update(key for key in row.columns if key not in read)
        try:
            made.append(Conversation(place=row.place, demonstration=_demonstration(row, data)))
        except (_Wrong, SetupError, ValueError) as error:
            found.add(row.place, str(error))
    found.raise_if_any()
    notes = []
    if unread:
        names = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unread.items()))
        notes.append(f"columns of the {split} rows that fine-tuning does not read: {names}")
    return Conversations(conversations=tuple(made), notes=tuple(notes))


class _Wrong(Exception):
    """A row is wrong; the message says how."""


def _demonstration(row: Row, data: SftDataConfig) -> Demonstration:
    columns = row.columns
    if columns.get(_SETTING) is not None:
        raise _Wrong(
            f"the column {_SETTING!r} would set a variable of the template for this row alone, "
            f"which is not available: leave it out and set agent.template_kwargs.{_SETTING}"
        )
    if columns.get(data.tools_key) is None:
        near = nearest(data.tools_key, [name for name in columns if name != data.messages_key])
        if near and data.tools_key not in columns:
            raise _Wrong(
                f"there is no column {data.tools_key!r}{near}: rename it, or set data.tools_key"
            )
    messages = _list(columns[data.messages_key], data.messages_key)
    tools = _list(columns.get(data.tools_key) or [], data.tools_key)
    made = [_message(value, f"{data.messages_key}[{i}]") for i, value in enumerate(messages)]
    specs = [_tool(value, f"{data.tools_key}[{i}]") for i, value in enumerate(tools)]
    _check_calls(made, specs, data)
    shown = with_images(made, columns.get(data.images_key), name=data.images_key)
    return Demonstration(messages=shown, tools=tuple(specs))


def _list(value: object, where: str) -> Sequence[object]:
    value = _decoded(value, where)
    if not isinstance(value, list):
        raise _Wrong(f"{where} must be a list, or a JSON text of one, got {value!r:.80}")
    return value


def _decoded(value: object, where: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise _Wrong(f"{where} is a string that is not JSON: {error}: {value!r:.80}") from None


def _message(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise _Wrong(f"{where} must be a mapping with role and content, got {value!r:.80}")
    given = {key: entry for key, entry in value.items() if entry is not None}
    role = given.pop("role", None)
    if role not in _ROLES:
        raise _Wrong(f"{where}.role must be {', '.join(_ROLES)}, got {role!r:.40}")
    known = _KEYS[role]
    if unknown := sorted(set(given) - set(known)):
        raise _Wrong(
            f"{where} is of the role {role} and has the unknown keys {', '.join(unknown)}; known: "
            f"role, {', '.join(known)}"
        )
    for key, entry in given.items():
        if key != "tool_calls" and not isinstance(entry, str):
            raise _Wrong(f"{where}.{key} must be a string, got {entry!r:.80}")
    calls = _list(given.pop("tool_calls", []), f"{where}.tool_calls")
    if "content" not in given and not calls:
        raise _Wrong(f"{where} has no content")
    return Message(
        role=role,
        content=given.pop("content", ""),
        tool_calls=tuple(
            _call(call, f"{where}.tool_calls[{i}]", i) for i, call in enumerate(calls)
        ),
        reasoning=given.pop("reasoning_content", None),
        **given,
    )


def _call(value: object, where: str, number: int) -> ToolCall:
    call = _section(value, where, ("id", "type", "function"))
    if call.get("type", "function") != "function":
        raise _Wrong(f"{where}.type must be function, got {call['type']!r:.40}")
    function = _section(call.get("function"), f"{where}.function", ("name", "arguments"))
    name, where = function.get("name"), f"{where}.function.arguments"
    if not isinstance(name, str) or not name:
        raise _Wrong(f"{where.removesuffix('arguments')}name must be a string, got {name!r:.40}")
    given = function.get("arguments", {})
    arguments = _decoded(given, where)
    if not isinstance(arguments, Mapping):
        raise _Wrong(f"{where} must be a mapping or a JSON text of one, got {given!r:.80}")
    if arguments is given:
        _check_without_null(arguments, where)
    return ToolCall(id=str(call.get("id", f"call-{number}")), name=name, arguments=arguments)


def _section(value: object, where: str, known: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _Wrong(f"{where} must be a mapping with {', '.join(known)}, got {value!r:.80}")
    given = {str(key): entry for key, entry in value.items() if entry is not None}
    if unknown := sorted(set(given) - set(known)):
        raise _Wrong(
            f"{where} has the unknown keys {', '.join(unknown)}; known: {', '.join(known)}"
        )
    return given


def _tool(value: object, where: str) -> ToolSpec:
    decoded = _decoded(value, where)
    if decoded is value:
        _check_without_null(decoded, where)
    return tool_spec(decoded, where)


def _check_without_null(value: object, where: str) -> None:
    """Rejects null: in Parquet it also stands for a key that only other rows have."""
    if (place := next(_nulls(value, where), None)) is not None:
        raise _Wrong(
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


def _check_calls(
    messages: Sequence[Message], tools: Sequence[ToolSpec], data: SftDataConfig
) -> None:
    """Rejects a call of a tool that the model is not shown: a rollout could not answer it."""
    shown = [tool.name for tool in tools]
    if len(set(shown)) < len(shown):
        raise _Wrong(f"{data.tools_key} names a tool twice: {', '.join(shown)}")
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            if shown and call.name not in shown:
                raise _Wrong(
                    f"{data.messages_key}[{index}] calls {call.name!r}, and {data.tools_key} has "
                    f"{', '.join(shown)}"
                )
