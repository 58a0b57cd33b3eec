"""A generator that repeats the last message, for any number of tasks without a script.

Invariant: the completion is a function of the prompt alone. It reads the chats of `ByteRenderer`.
"""

import asyncio
from collections.abc import Sequence

from treadle.agent_loop.generator import RequestContext
from treadle.agent_loop.testing.byte_renderer import END
from treadle.agent_loop.testing.scripted import reply
from treadle.agent_loop.tokens.renderer import PlacedImage
from treadle.agent_loop.types import Completion, SamplingParams


class EchoGenerator:
    """Samples the bytes of the conversation's last closed message, then the end mark."""

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Repeats the last message of the prompt."""
        await asyncio.sleep(0)
        ids = list(prompt)
        if END not in ids:
            return reply((END,), params)
        stop = len(ids) - 1 - ids[::-1].index(END)
        start = stop
        while start > 0 and ids[start - 1] < END:
            start -= 1
        return reply((*ids[start:stop], END), params)

    def finish_session(self, session_id: str) -> None:
        """Does nothing; there is nothing to free."""
