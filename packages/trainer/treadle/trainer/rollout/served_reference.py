"""The served reference: rollout servers that someone else runs score what the policy sampled.

The servers hold another model, such as the teacher of a distillation. A sequence goes there as a
prompt up to its last loss token; what comes back are the log-probabilities of its ids from the
first loss token on, and one sampled token, which nobody reads. Servers load their model once: their
weights do not change.

Who waits: the step, for all sequences, as many at once as the servers run; a sequence, for a server
that takes it, up to the client's deadline for one call (`RpcDeadlines.generate_s`). After that the
run ends with an error that names the servers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from treadle.agent_loop import FloatArray, RequestContext, SamplingParams, SetupError
from treadle.agent_loop.aio import concurrently
from treadle.agent_loop.rpc import GrpcTokenGenerator, Requirements, RpcDeadlines, connect
from treadle.trainer.config.schema import Config
from treadle.trainer.rollout.server_security import server_security

if TYPE_CHECKING:
    from treadle.agent_loop.hf import HfRenderer
    from treadle.policy.client.types import TrainSequence

__all__ = ["ServedReference", "check_served_reference", "connect_reference"]

_DEADLINES = RpcDeadlines(connect_s=10.0)
"""The servers run already, so one that does not answer is soon an error."""
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class ServedReference:
    """Asks the servers of a reference."""

    def __init__(self, generator: GrpcTokenGenerator) -> None:
        self._generator = generator
        slots = sum(server.max_in_flight for server in generator.servers)
        self._slots = asyncio.Semaphore(slots)
        self._num_asked = 0

    async def logprobs(self, sequences: Sequence[TrainSequence]) -> list[FloatArray]:
        """Returns log p(ids[t] | ids[:t]) in nats at temperature 1, [L] per sequence.

        Entries outside `TrainSequence.loss_mask` are 0 or of ids that were observed; nothing reads
        them.

        Raises:
            GenerationError: No server answers, or none takes a sequence; the message names them.
        """
        return await concurrently(self._score(sequence) for sequence in sequences)

    async def _score(self, sequence: TrainSequence) -> FloatArray:
        positions = sequence.loss_positions.tolist()
        length = len(sequence.ids)
        if not positions:
            return FloatArray((0.0,) * length)
        first, stop = positions[0], positions[-1] + 1
        self._num_asked += 1
        name = f"reference-{self._num_asked}"
        request = RequestContext(
            request_id=name, session_id=name, deadline=math.inf, prompt_logprobs_from=first
        )
        async with self._slots:
            try:
                completion = await self._generator.generate(
                    sequence.ids[:stop],
                    _ONE_TOKEN,
                    request=request,
                    images=[placed for placed in sequence.images if placed.start < stop],
                )
            finally:
                self._generator.finish_session(name)
        return FloatArray((*(0.0,) * first, *completion.prompt_logprobs, *(0.0,) * (length - stop)))


@asynccontextmanager
async def connect_reference(config: Config, renderer: HfRenderer) -> AsyncIterator[ServedReference]:
    """Connects to the servers of `algorithm.reference_addresses`, with the security of `rollout`.

    Raises:
        SetupError: A server does not answer, or its model cannot score what the policy samples.
    """
    needs = Requirements(
        tokenizer_sha256=renderer.tokenizer_sha256,
        vocab_size=renderer.vocab_size,
        # The longest sequence, and the token that a server samples after it.
        context_length=config.rollout.context_length + 1,
        capabilities=frozenset({"prompt_logprobs", "sampled_logprobs"}),
    )
    addresses = config.algorithm.reference_addresses
    async with AsyncExitStack() as stack:
        try:
            generator = await stack.enter_async_context(
                connect(
                    addresses,
                    requirements=needs,
                    security=server_security(config.rollout).read(),
                    deadlines=_DEADLINES,
                    client="treadle-trainer",
                )
            )
        except SetupError as error:
            raise SetupError(f"algorithm.reference_addresses={list(addresses)}: {error}") from error
        yield ServedReference(generator)


def check_served_reference(config: Config, renderer: HfRenderer) -> None:
    """Asks the servers whether they can score what the policy samples.

    Raises:
        SetupError: See `connect_reference`.
    """

    async def ask() -> None:
        async with connect_reference(config, renderer):
            pass

    # In a thread, because the caller's may run an event loop, as in a notebook.
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, ask()).result()
