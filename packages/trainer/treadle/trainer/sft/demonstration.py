"""A demonstration: a finished conversation to imitate."""

from dataclasses import dataclass

from treadle.agent_loop import Message, ToolSpec

__all__ = ["Demonstration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to imitate.

    Attributes:
        messages: Ends with an assistant's turn; every assistant's turn is imitated.
        tools: The tools in the prompt.

    Raises:
        ValueError: The conversation is empty, does not end with an assistant's turn, starts with
            one, or has two in a row.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()

    def __post_init__(self) -> None:
        """Checks the order of the roles."""
        roles = [message.role for message in self.messages]
        if not roles or roles[-1] != "assistant":
            raise ValueError(f"a demonstration ends with an assistant's turn; got roles {roles}")
        previous = "assistant"
        for role in roles:
            if role == previous == "assistant":
                raise ValueError(f"an assistant's turn answers another role's message; got {roles}")
            previous = role
