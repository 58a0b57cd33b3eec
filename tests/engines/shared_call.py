"""Completions of the agent loop's client, which share one call of a real server."""

import asyncio
import math

from treadle.agent_loop import Completion, RequestContext, SamplingParams
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
from treadle.conformance.client.remote_engine import connect_engine
from treadle.conformance.contracts.reader import random_prompt, request, run
from treadle.conformance.contracts.remote_contract import plain_channel

_PROMPTS = tuple(random_prompt(20 + 3 * place, 256, seed=place) for place in range(5))
_NUM_TOKENS = 24
_LONG = 600


async def check_shared_call(address: str) -> None:
    """Checks that each has the tokens of a single call, also if another one is cancelled.

    Args:
        address: Of a server with the tiny model and nothing else to do.
    """
    async with plain_channel(address) as channel, connect_engine(channel) as engine:
        wanted = [request(prompt, temperature=0.0, max_tokens=_NUM_TOKENS) for prompt in _PROMPTS]
        alone = [(await run(engine, one)).token_ids for one in wanted]
        async with connect([address]) as generator:
            assert "generate_many" in generator.servers[0].capabilities
            begun = asyncio.Event()
            cancelled = asyncio.create_task(_sample(generator, 0, _LONG, begun))
            others = [
                asyncio.create_task(_sample(generator, place, _NUM_TOKENS))
                for place in range(1, len(_PROMPTS))
            ]
            first = asyncio.create_task(begun.wait())
            await asyncio.wait({first, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            cancelled.cancel()
            together = [tuple((await one).token_ids) for one in others]
            await asyncio.wait({cancelled})
            again = await _sample(generator, 0, _NUM_TOKENS)
    assert [tuple(again.token_ids), *together] == alone


async def _sample(
    generator: GrpcTokenGenerator, place: int, num_tokens: int, begun: asyncio.Event | None = None
) -> Completion:
    context = RequestContext(
        request_id=f"shared-{place}",
        session_id=f"shared-{place}",
        deadline=math.inf,
        on_tokens=None if begun is None else lambda _: begun.set(),
    )
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return await generator.generate(_PROMPTS[place], params, request=context)
