"""Shortens a prompt that is too long: cuts characters out of its longest message.

Invariant: the result is within the limit, every other message stays, and no shorter cut on the way
of the bisection fitted. verl cuts token ids, which would cut the chat template's own as well.
All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from treadle.agent_loop import Message

__all__ = ["Side", "shorten"]

Side = Literal["left", "right", "middle"]


def shorten(
    messages: Sequence[Message],
    side: Side,
    *,
    limit: int,
    count: Callable[[Sequence[Message]], int],
) -> tuple[tuple[Message, ...], int] | None:
    """Returns the messages with their number of tokens; None if nothing can be kept.

    Args:
        messages: A prompt of more than `limit` tokens.
        side: Which part of its longest message is cut out.
        count: Number of tokens of a prompt when it is rendered.
    """
    longest = max(range(len(messages)), key=lambda index: len(messages[index].content))
    text = messages[longest].content

    def kept(characters: int) -> tuple[Message, ...]:
        short = replace(messages[longest], content=_keep(text, characters, side))
        return (*messages[:longest], short, *messages[longest + 1 :])

    low, high = 0, len(text) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if count(kept(middle)) <= limit:
            low = middle
        else:
            high = middle - 1
    found = kept(low)
    num_tokens = count(found)
    return (found, num_tokens) if low > 0 and num_tokens <= limit else None


def _keep(text: str, characters: int, side: Side) -> str:
    match side:
        case "left":
            return text[len(text) - characters :]
        case "right":
            return text[:characters]
        case "middle":
            head = characters - characters // 2
            return text[:head] + text[len(text) - characters // 2 :]
