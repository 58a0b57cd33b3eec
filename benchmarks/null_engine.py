"""The null engine: every completion is 32 fixed tokens after a fixed time, to measure the server.

Select it by `--engine null_engine:create` in a server that `COMMAND` starts. The simulated time of
a token is `fake.decode_s_per_token`.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator

from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    ModelInfo,
    NamedTensor,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine

COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path[:] = {sys.path!r}\n"
    "from treadle.rollout_server.main import main; sys.exit(main())",
)
"""Starts a server that can import this module, from any working directory."""

COMPLETION_TOKENS = 32
_TOKENS = Tokens(tuple(range(COMPLETION_TOKENS)), (-1.0,) * COMPLETION_TOKENS, 0)


class NullEngine(FakeEngine):
    """A fake engine that ignores prompts and weights and does not sample.

    Args:
        work_s: Seconds per completion.
    """

    def __init__(self, work_s: float) -> None:
        model = ModelInfo(
            architecture="null", vocab_size=256, context_length=4096, eos_token_ids=frozenset()
        )
        super().__init__(model=model, clock=asyncio.get_running_loop())
        self._work_s = work_s

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        """Reads and ignores the tensors."""
        async for _ in tensors:
            pass

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        """Yields the same tokens for every request."""
        yield Started(0)
        if self._work_s:
            await asyncio.sleep(self._work_s)
        yield _TOKENS
        yield Finished(FinishReason.LENGTH)


async def create(config: ServerConfig) -> NullEngine:
    """Builds the engine of a configuration."""
    return NullEngine(config.fake.decode_s_per_token * COMPLETION_TOKENS)
