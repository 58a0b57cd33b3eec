"""The sessions of one batch of tasks: those that a loop left open are finished with the batch.

Invariant: the generator lives longer than the batch, and an open session keeps its share of a
replica; so no session of the batch is open after it, however it ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from treadle.agent_loop import (
    Completion,
    PlacedImage,
    RequestContext,
    SamplingParams,
    TokenGenerator,
)

__all__ = ["OpenSessions"]


@dataclass(slots=True)
class OpenSessions:
    """A token generator for one batch of tasks; a context manager around the batch."""

    generator: TokenGenerator
    _open: set[str] = field(default_factory=set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for session_id in list(self._open):
            self.finish_session(session_id)

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        request: RequestContext,
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """See `TokenGenerator.generate`."""
        self._open.add(request.session_id)
        return await self.generator.generate(prompt, params, request=request, images=images)

    def finish_session(self, session_id: str) -> None:
        """See `TokenGenerator.finish_session`."""
        self._open.discard(session_id)
        self.generator.finish_session(session_id)
