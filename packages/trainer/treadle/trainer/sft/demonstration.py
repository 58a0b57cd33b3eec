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
        unlearned: Places in `messages` of assistant's turns that are not imitated.

    Raises:
        ValueError: The conversation is empty, does not end with an assistant's turn, starts with
            one, has two in a row, or has none to imitate.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    unlearned: frozenset[int] = frozenset()

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
        if roles.count("assistant") == len(self.unlearned):
            raise ValueError("every assistant's turn has the weight 0: nothing would be learned")
