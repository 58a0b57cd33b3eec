"""An interaction that gives prepared replies, and keeps account of its sessions.

Invariant: a session that is not open cannot be asked and one is closed at most once; breaking
that fails the test.
"""

import asyncio
from collections.abc import Iterable, Sequence

from treadle.agent_loop.tools.interaction import InteractionReply
from treadle.agent_loop.types import AgentTask, Message


class ScriptedInteraction:
    """Gives prepared replies in the order in which it is asked, over all sessions.

    Args:
        replies: Each a text, an `InteractionReply`, an exception to raise, or an event to wait
            for (then the text "go on").

    Attributes:
        conversations: The conversations that it was asked about so far.
        num_opened: Sessions opened.
        num_closed: Sessions closed.
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
        """Waits until it was asked `count` times."""
        async with self._asked:
            await self._asked.wait_for(lambda: len(self.conversations) >= count)

    async def open(self, task: AgentTask) -> "_ScriptedSession":
        """Opens a session."""
        self.num_opened += 1
        return _ScriptedSession(self)

    async def take(self, messages: Sequence[Message]) -> InteractionReply:
        """Gives the next reply of the script."""
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
