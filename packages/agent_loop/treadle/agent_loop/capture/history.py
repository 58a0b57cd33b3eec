"""Compares the history that an agent sends back with the recorded one.

Invariant: pure. A returned assistant message is the same turn if it comes back

- unchanged: EXACT; or
- with one of these rewrites, which agents are known to make and which keep the meaning: REWRITTEN
    1. its arguments serialised again: keys in another order, 1.0 as 1 (other white space does not
       matter, because arguments are compared as data);
    2. its text stripped, or its empty text given as null;
    3. its reasoning left out;
    4. the stop string appended that was cut off its text;
    5. other ids of its calls: what is rendered has the ids that the model wrote (`with_own_ids`).

Anything else, and any change of a message that the agent wrote itself, is an edit.
"""

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.agent_loop.types import Message, ToolCall


class Sameness(enum.Enum):
    """How a message from the agent relates to the recorded one."""

    EXACT = "exact"
    REWRITTEN = "rewritten"
    EDITED = "edited"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedTurn:
    """A sampled turn of a branch.

    Attributes:
        index: Index of its message among the branch's messages.
        start: Position of its first id.
        stop: Position after its last id.
        uncut: Its text including the stop string that was cut off; None if it was not cut.
        call_ids: The ids of its calls as the model wrote them.
        agent_ids: The ids that the agent has for them, where it sent the turn back.
    """

    index: int
    start: int
    stop: int
    uncut: str | None = None
    call_ids: tuple[str, ...] = ()
    agent_ids: tuple[str, ...] = ()

    def sent_back(self, message: Message) -> "ReturnedTurn":
        """Returns the turn with the ids that the agent has for its calls."""
        ids = tuple(call.id for call in message.tool_calls)
        return self if ids == self.agent_ids else replace(self, agent_ids=ids)


def compare(returned: Message, given: Message, *, uncut: str | None = None) -> Sameness:
    """Compares a returned message with the one at its position in a request."""
    same_calls = _exact(returned.tool_calls) == _exact(given.tool_calls)
    if same_calls and _with_reasoning_or_none(returned) == _with_reasoning_or_none(given):
        return Sameness.EXACT
    texts = {returned.content.strip()} | ({uncut.strip()} if uncut is not None else set())
    same = (
        given.role == returned.role
        and given.content.strip() in texts
        and (given.reasoning or "").strip() in ("", (returned.reasoning or "").strip())
        and len({call.id for call in given.tool_calls}) == len(given.tool_calls)
        and _meaning(given.tool_calls) == _meaning(returned.tool_calls)
    )
    return Sameness.REWRITTEN if same else Sameness.EDITED


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """How much of a recorded history a request still has.

    Attributes:
        num_messages: Number of leading messages that are the same.
        num_rewritten: Number of these that are rewritten.
    """

    num_messages: int
    num_rewritten: int


def shared_history(
    recorded: Sequence[Message], turns: Sequence[ReturnedTurn], given: Sequence[Message]
) -> Shared:
    """Compares message by message up to the first edit.

    Args:
        turns: The sampled turns among them.
    """
    returned = {turn.index: turn for turn in turns}
    rewritten = 0
    for index, (ours, theirs) in enumerate(zip(recorded, given, strict=False)):
        if (turn := returned.get(index)) is None:
            if ours != theirs:
                return Shared(num_messages=index, num_rewritten=rewritten)
            continue
        match compare(ours, theirs, uncut=turn.uncut):
            case Sameness.EDITED:
                return Shared(num_messages=index, num_rewritten=rewritten)
            case Sameness.REWRITTEN:
                rewritten += 1
    return Shared(num_messages=min(len(recorded), len(given)), num_rewritten=rewritten)


def with_own_ids(messages: Sequence[Message], turns: Sequence[ReturnedTurn]) -> tuple[Message, ...]:
    """Returns messages with the ids that the model wrote, in its calls and in their answers.

    Args:
        turns: The sampled turns among them, those that were sent back with the agent's ids.
    """
    calling = {turn.index: turn for turn in turns if turn.call_ids}
    own: dict[str, str] = {}
    renamed = list(messages)
    for index, message in enumerate(messages):
        if (turn := calling.get(index)) is not None:
            own.update(zip(turn.agent_ids, turn.call_ids, strict=False))
            own_ids = zip(message.tool_calls, turn.call_ids, strict=True)
            calls = tuple(replace(call, id=own_id) for call, own_id in own_ids)
            renamed[index] = replace(message, tool_calls=calls)
        elif message.tool_call_id in own:
            renamed[index] = replace(message, tool_call_id=own[message.tool_call_id])
    return tuple(renamed)


def _with_reasoning_or_none(message: Message) -> Message:
    """Replaces an empty reasoning by None, because the agent cannot tell them apart."""
    return replace(message, reasoning=None) if message.reasoning == "" else message


def _exact(calls: Sequence[ToolCall]) -> list[str]:
    return [json.dumps(dict(call.arguments)) for call in calls]


def _meaning(calls: Sequence[ToolCall]) -> list[tuple[str, str]]:
    return [(c.name, json.dumps(_plain(c.arguments), sort_keys=True)) for c in calls]


def _plain(value: object) -> object:
    """Returns JSON data with whole numbers as integers, as JavaScript writes them."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case Mapping():
            return {key: _plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain(entry) for entry in value]
        case _:
            return value
