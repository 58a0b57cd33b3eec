"""Rows of files -> demonstrations, in verl's columns.

A row has `messages` (role, content, tool_calls, tool_call_id, name, reasoning_content) and may have
`tools` (OpenAI's function schemas) and `images` (see `data.images`). Messages and tools may each be
a JSON text; in Parquet that is the safe form of tools and arguments, as a struct there has the keys
of all rows, with null where a row has none.

Invariant: nothing in these columns is ignored: content that cannot be read is an error with file,
row and cause. Other columns are not read, which a note reports.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop import Message, SetupError, ToolSpec
from treadle.tools.catalog import tool_spec
from treadle.trainer.config.sft import SftDataConfig
from treadle.trainer.data import Row, read_rows
from treadle.trainer.data.errors import nearest
from treadle.trainer.data.images import with_images
from treadle.trainer.data.messages import (
    WrongMessage,
    check_without_null,
    decoded,
    read_list,
    read_message,
)
from treadle.trainer.data.row_problems import RowProblems
from treadle.trainer.sft.demonstration import Demonstration

__all__ = ["Conversations", "PlacedDemonstration", "read_conversations"]

_SETTING = "enable_thinking"
"""A column by which verl sets a variable of the template row by row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDemonstration:
    """A row's demonstration; `place` names its file and line."""

    place: str
    demonstration: Demonstration


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The conversations of a split, in the order of the rows; `notes` are printed at the start."""

    conversations: tuple[PlacedDemonstration, ...]
    notes: tuple[str, ...]


def read_conversations(
    paths: Sequence[Path], data: SftDataConfig, *, split: str, limit: int | None = None
) -> Conversations:
    """Reads the conversations of all files, in order.

    Args:
        split: Names the rows in messages: "train" or "val".
        limit: Maximum number of rows. None: read all.

    Raises:
        DataError: A file or a row cannot be used.
        SeveralProblems: More than one of these.
    """
    rows = read_rows(paths, required=(data.messages_key,), limit=limit)
    read = (data.messages_key, data.tools_key, data.images_key)
    found = RowProblems(f"{split} rows")
    made: list[PlacedDemonstration] = []
    unread: Counter[str] = Counter()
    for row in rows:
        unread.update(key for key in row.columns if key not in read)
        try:
            made.append(
                PlacedDemonstration(place=row.place, demonstration=_demonstration(row, data))
            )
        except (WrongMessage, SetupError, ValueError) as error:
            found.add(row.place, str(error))
    found.raise_if_any()
    notes = []
    if unread:
        names = ", ".join(f"{name} ({count} rows)" for name, count in sorted(unread.items()))
        notes.append(f"columns of the {split} rows that fine-tuning does not read: {names}")
    return Conversations(conversations=tuple(made), notes=tuple(notes))


def _demonstration(row: Row, data: SftDataConfig) -> Demonstration:
    columns = row.columns
    if columns.get(_SETTING) is not None:
        raise WrongMessage(
            f"the column {_SETTING!r} would set a variable of the template for this row alone, "
            f"which is not available: leave it out and set agent.template_kwargs.{_SETTING}"
        )
    if columns.get(data.tools_key) is None:
        near = nearest(data.tools_key, [name for name in columns if name != data.messages_key])
        if near and data.tools_key not in columns:
            raise WrongMessage(
                f"there is no column {data.tools_key!r}{near}: rename it, or set data.tools_key"
            )
    messages = read_list(columns[data.messages_key], data.messages_key)
    tools = read_list(columns.get(data.tools_key) or [], data.tools_key)
    shows = bool(columns.get(data.images_key))
    messages, unlearned = _without_weights(messages, data.messages_key)
    made = [
        read_message(value, f"{data.messages_key}[{i}]", exact=row.exact, images=shows)
        for i, value in enumerate(messages)
    ]
    specs = [_tool(value, f"{data.tools_key}[{i}]", row) for i, value in enumerate(tools)]
    _check_calls(made, specs, data)
    shown = with_images(made, columns.get(data.images_key), name=data.images_key)
    return Demonstration(messages=shown, tools=tuple(specs), unlearned=unlearned)


def _without_weights(
    messages: Sequence[object], name: str
) -> tuple[Sequence[object], frozenset[int]]:
    """Returns the messages without `weight`, and which of them have the weight 0."""
    result: list[object] = []
    unlearned = set()
    for index, message in enumerate(messages):
        given = dict(message) if isinstance(message, Mapping) else {}
        weight = given.pop("weight", None)
        if weight is not None and (given.get("role") != "assistant" or weight not in (0, 1)):
            raise WrongMessage(
                f"{name}[{index}].weight is {weight!r:.40}: it must be 0 or 1, on assistant's turns"
            )
        if weight == 0:
            unlearned.add(index)
        result.append(given if isinstance(message, Mapping) else message)
    return result, frozenset(unlearned)


def _tool(value: object, where: str, row: Row) -> ToolSpec:
    schema = decoded(value, where)
    if schema is value and not row.exact:
        check_without_null(schema, where)
    return tool_spec(schema, where)


def _check_calls(
    messages: Sequence[Message], tools: Sequence[ToolSpec], data: SftDataConfig
) -> None:
    """Rejects a call of a tool that the model is not shown: a rollout could not answer it."""
    shown = [tool.name for tool in tools]
    if len(set(shown)) < len(shown):
        raise WrongMessage(f"{data.tools_key} names a tool twice: {', '.join(shown)}")
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            if shown and call.name not in shown:
                raise WrongMessage(
                    f"{data.messages_key}[{index}] calls {call.name!r}, and {data.tools_key} has "
                    f"{', '.join(shown)}"
                )
