"""Limits of a trajectory, and the written order in which they are checked.

Invariant: the response budget is shared by what the model samples and what the tools say, and a
trajectory's last tokens are always sampled ones. After every completion, in this order, the
first check that holds ends the trajectory:

| # | Check | Stop |
|---|---|---|
| 1 | the model ended its turn, asks for no tool, and no interaction goes on | FINISHED |
| 2 | response (sampled + observed) >= max_response_tokens | RESPONSE_LENGTH |
| 3 | prompt + response >= max_context_tokens | CONTEXT_LENGTH |
| 4 | the completion was cut by its own max_tokens: its turn is open | TURN_LENGTH |
| 5 | completions >= max_assistant_turns | ASSISTANT_TURNS |
| 6 | answers >= max_user_turns | USER_TURNS |
|   | the first max_parallel_calls calls run, their texts are cut; or the interaction's reply | |
| 7 | a tool said stop | TOOL_STOP |
| 8 | response + answer >= max_response_tokens; the answer is *not* appended | RESPONSE_LENGTH |
| 9 | prompt + response + answer >= max_context_tokens; likewise | CONTEXT_LENGTH |

An interaction is asked before check 2, so that a turn which reaches a limit is scored too.

The tokens are those of verl's order (`tool_agent_loop.py`); the reason is more exact: verl looks
for calls last, so that an answer which just fits would count as cut.

A tool's text that is cut is a text again: the template renders it like any other, so the ids that
enter the transcript are the template's, and may be a few more than the limit where the cut and
the marker meet. Pure; nothing waits.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from treadle.agent_loop.types import StopReason

_CLOSE_S = 5.0
_SPLIT = "\ufffd"
S = TypeVar("S", str, tuple[int, ...])


class TextCodec(Protocol):
    """Turns plain text into ids and back, as every `ChatRenderer` does."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        ...


class TruncateSide(enum.StrEnum):
    """Which side of a long tool text is cut away, in the meaning of verl since PR #6313."""

    LEFT = "left"
    """Cut the left: keep the tail."""
    RIGHT = "right"
    """Cut the right: keep the head."""
    MIDDLE = "middle"
    """Cut the middle: keep half of the head and half of the tail."""


_MARKERS = {
    TruncateSide.LEFT: "(truncated)...",
    TruncateSide.RIGHT: "...(truncated)",
    TruncateSide.MIDDLE: "...(truncated)...",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Bounds of one trajectory. None: no bound.

    Attributes:
        max_response_tokens: Sampled and observed tokens together.
        max_context_tokens: Prompt and response together; the server's context length.
        max_assistant_turns: Completions.
        max_user_turns: Answers given to the model: rounds of tool calls, and an interaction's
            replies.
        max_parallel_calls: Calls of one turn that are run; the rest is ignored and counted.
        max_tool_response_chars: Characters kept of one tool text, without the marker.
        max_tool_response_tokens: Tokens kept of one tool text, without the marker.
        tool_response_truncate_side: Which side of a longer text is cut.
        tool_timeout_s: Seconds for one tool call, after which it is cancelled and the model is
            told so; and for one reply of an interaction, after which the attempt fails.

    Raises:
        ValueError: A bound is below 1, or the timeout is not positive.
    """

    max_response_tokens: int
    max_context_tokens: int | None = None
    max_assistant_turns: int | None = None
    max_user_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_chars: int | None = 256
    max_tool_response_tokens: int | None = None
    tool_response_truncate_side: TruncateSide = TruncateSide.MIDDLE
    tool_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "max_response_tokens",
            "max_context_tokens",
            "max_assistant_turns",
            "max_user_turns",
            "max_parallel_calls",
            "max_tool_response_chars",
            "max_tool_response_tokens",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not self.tool_timeout_s > 0:
            raise ValueError(f"tool_timeout_s is {self.tool_timeout_s}; it must be above 0")
        object.__setattr__(
            self, "tool_response_truncate_side", TruncateSide(self.tool_response_truncate_side)
        )

    @property
    def close_timeout_s(self) -> float:
        """Seconds for freeing what one session of a tool or an interaction holds.

        Short, because a trajectory that passed its deadline waits for it.
        """
        return min(self.tool_timeout_s, _CLOSE_S)

    def tokens_left(self, *, prompt: int, response: int) -> int:
        """Tokens that may still be sampled; 0 or less when the budget is used up."""
        left = self.max_response_tokens - response
        if self.max_context_tokens is not None:
            left = min(left, self.max_context_tokens - prompt - response)
        return left

    def length_stop(self, *, prompt: int, response: int) -> StopReason | None:
        """Checks 2 and 3; and 8 and 9, with the answer counted in `response`."""
        if response >= self.max_response_tokens:
            return StopReason.RESPONSE_LENGTH
        if self.max_context_tokens is not None and prompt + response >= self.max_context_tokens:
            return StopReason.CONTEXT_LENGTH
        return None

    def turn_stop(self, *, assistant_turns: int, user_turns: int) -> StopReason | None:
        """Checks 5 and 6."""
        if self.max_assistant_turns is not None and assistant_turns >= self.max_assistant_turns:
            return StopReason.ASSISTANT_TURNS
        if self.max_user_turns is not None and user_turns >= self.max_user_turns:
            return StopReason.USER_TURNS
        return None

    def truncate_tool_text(self, text: str, codec: TextCodec) -> str:
        """Cuts a tool's text to its characters, then to its tokens; one marker comes on top.

        Args:
            text: Of the tool.
            codec: Counts the tokens; asked only where `max_tool_response_tokens` is set.
        """
        side = self.tool_response_truncate_side
        head, tail, cut = _keep(text, self.max_tool_response_chars, side)
        if self.max_tool_response_tokens is not None:
            keep = self.max_tool_response_tokens
            first, last = codec.encode(head), codec.encode(tail)
            if len(first) + len(last) > keep:
                if cut and side is TruncateSide.MIDDLE:  # the middle is between them
                    half = keep // 2
                    first, last = first[:half], last[len(last) - min(half, len(last)) :]
                else:
                    first, last, cut = _keep(first + last, keep, side)
                # A character that the cut went through decodes to the replacement character.
                head = codec.decode(first).rstrip(_SPLIT)
                tail = codec.decode(last).lstrip(_SPLIT)
        if not cut:
            return text
        return head + _MARKERS[side] + tail


def _keep(whole: S, limit: int | None, side: TruncateSide) -> tuple[S, S, bool]:
    """What is left before and after the cut, and whether there is one."""
    if limit is None or len(whole) <= limit:
        return whole, whole[:0], False
    match side:
        case TruncateSide.LEFT:
            return whole[:0], whole[-limit:], True
        case TruncateSide.RIGHT:
            return whole[:limit], whole[:0], True
        case TruncateSide.MIDDLE:
            half = limit // 2
            return whole[:half], whole[len(whole) - half :], True
