"""An interaction that returns prepared replies, and counts its sessions.

Invariant: asking a closed session, or closing a session twice, fails the test.
"""

import asyncio
from collections.abc import Iterable, Sequence

from treadle.agent_loop.tools.interaction import InteractionReply
from treadle.agent_loop.types import AgentTask, Message


class ScriptedInteraction:
    """Returns prepared replies in the order of the calls, over all sessions.

    Args:
        replies: Each a string, an `InteractionReply`, an exception to raise, or an event to wait
            for (the reply is then "go on").

    Attributes:
        conversations: The messages of each call so far.
    """

    def __init__(
        self, replies: Iterable[str | InteractionReply | Exception | asyncio.Event] = ()
    ) -> None:
        self.conversations: list[tuple[Message, ...]] = []
        self.num_opened = 0
        self.num_closed = 0
        self._replies = iter(tuple(replies))
        self._asked = asyncio.Condition()

    async def until_asked(self, count: int) -> None:
        """Waits until at least `count` replies were requested."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.conversations) >= count)

    async def open(self, task: AgentTask) -> "_ScriptedSession":
        """Opens a session."""
        self.num_opened += 1
        return _ScriptedSession(self)

    async def take(self, messages: Sequence[Message]) -> InteractionReply:
        """Returns the next reply of the script."""
        self.conversations.append(tuple(messages))
        async with self._asked:
            self._asked.notify_all()
        reply = next(self._replies, None)
        match reply:
            case None:
                raise AssertionError(f"no reply left for turn {len(self.conversations)}")
            case Exception():
                raise reply
            case InteractionReply():
                return reply
            case asyncio.Event():
                await reply.wait()
                return InteractionReply(content="go on")
            case _:
                return InteractionReply(content=reply)


class _ScriptedSession:
    def __init__(self, interaction: ScriptedInteraction) -> None:
        self._interaction = interaction
        self._closed = False

    async def respond(self, messages: Sequence[Message]) -> InteractionReply:
        assert not self._closed, "asked after aclose"
        return await self._interaction.take(messages)

    async def aclose(self) -> None:
        assert not self._closed, "closed twice"
        self._closed = True
        self._interaction.num_closed += 1
