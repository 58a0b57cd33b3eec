"""Limits of a trajectory, and the order in which they are checked.

Invariant: sampled tokens and tool results share the response budget, and a trajectory's last
tokens are always sampled ones. After every completion, the first of these checks that holds ends
the trajectory:

| # | Check | Stop |
|---|---|---|
| 1 | the model ended its turn without a tool call, and no interaction continues | FINISHED |
| 2 | response (sampled + observed) >= max_response_tokens | RESPONSE_LENGTH |
| 3 | prompt + response >= max_context_tokens | CONTEXT_LENGTH |
| 4 | the completion was cut by its own max_tokens: its turn is open | TURN_LENGTH |
| 5 | completions >= max_assistant_turns | ASSISTANT_TURNS |
| 6 | answers >= max_user_turns | USER_TURNS |
|   | the first max_parallel_calls calls run, their texts are cut; or the interaction's reply | |
| 7 | a tool's result ends the trajectory | TOOL_STOP |
| 8 | response + answer >= max_response_tokens; the answer is *not* appended | RESPONSE_LENGTH |
| 9 | prompt + response + answer >= max_context_tokens; likewise | CONTEXT_LENGTH |

The interaction replies before check 2, so a turn that reaches a limit is scored too.

The trajectory's tokens are the same as in verl (`tool_agent_loop.py`). The stop reason is more
exact: verl looks for calls last, so an answer that just fits would count as cut. Pure; nothing
waits.
"""

from dataclasses import dataclass

from treadle.agent_loop.tools.text_truncation import TextCodec, TruncateSide, truncate_text
from treadle.agent_loop.types import StopReason

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLimits:
    """Bounds of one trajectory. None means no bound.

    Attributes:
        max_response_tokens: Maximum number of sampled and observed tokens together.
        max_context_tokens: Maximum number of prompt and response tokens together; the server's
            context length.
        max_user_turns: Maximum number of answers to the model: rounds of tool calls, and replies
            of an interaction.
        max_parallel_calls: Maximum number of calls that are run per turn; the others are ignored
            and counted.
        max_tool_response_chars: Maximum number of characters per tool text, without the marker.
        max_tool_response_tokens: Maximum number of tokens per tool text, without the marker.
        tool_response_truncate_side: Which side of a longer text is cut.
        tool_timeout_s: Seconds for one tool call, after which it is cancelled and the model is
            told; and for one reply of an interaction, after which the attempt fails.

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
        """Time limit for closing one session of a tool or an interaction.

        Short, because a trajectory that has passed its deadline waits for it.
        """
        return min(self.tool_timeout_s, _CLOSE_S)

    def tokens_left(self, *, prompt: int, response: int) -> int:
        """Returns the number of tokens that may still be sampled; 0 or less means none."""
        left = self.max_response_tokens - response
        if self.max_context_tokens is not None:
            left = min(left, self.max_context_tokens - prompt - response)
        return left

    def length_stop(self, *, prompt: int, response: int) -> StopReason | None:
        """Runs checks 2 and 3; and checks 8 and 9, if `response` includes the answer."""
        if response >= self.max_response_tokens:
            return StopReason.RESPONSE_LENGTH
        if self.max_context_tokens is not None and prompt + response >= self.max_context_tokens:
            return StopReason.CONTEXT_LENGTH
        return None

    def turn_stop(self, *, assistant_turns: int, user_turns: int) -> StopReason | None:
        """Runs checks 5 and 6."""
        if self.max_assistant_turns is not None and assistant_turns >= self.max_assistant_turns:
            return StopReason.ASSISTANT_TURNS
        if self.max_user_turns is not None and user_turns >= self.max_user_turns:
            return StopReason.USER_TURNS
        return None

    def truncate_tool_text(self, text: str, codec: TextCodec) -> str:
        """Truncates a tool's text to the limits; the marker of the cut comes on top.

        Args:
            codec: Counts the tokens; used only if `max_tool_response_tokens` is set.
        """
        return truncate_text(
            text,
            codec,
            max_chars=self.max_tool_response_chars,
            max_tokens=self.max_tool_response_tokens,
            side=self.tool_response_truncate_side,
        )
