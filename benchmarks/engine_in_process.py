"""An engine driven in its own process, without a server: the peer of `engine_server_ratio`.

Takes the server's own options, so that both have the same engine; for each line of JSON on standard
input (see `Batch`) it runs that many completions at once and prints what they took.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass
from random import Random

import uvloop

from treadle.rollout_server.config.command_line import parse
from treadle.rollout_server.engine import Engine, EngineRequest, Sampling, Tokens
from treadle.rollout_server.registry import engine_factory


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Completions that run at once.

    Attributes:
        seed: Chooses the prompts, and what is sampled.
        size: How many.
        prompt_tokens: Of each prompt.
        max_tokens: Of each completion, all of which are sampled.
        vocab_size: Prompt ids are below it.
    """

    seed: int
    size: int
    prompt_tokens: int
    max_tokens: int
    vocab_size: int

    def prompt(self, index: int) -> list[int]:
        """One prompt, the same wherever it is asked for."""
        draw = Random(self.seed << 16 | index)
        return [draw.randrange(4, self.vocab_size) for _ in range(self.prompt_tokens)]


async def run_batch(engine: Engine, batch: Batch) -> int:
    """Runs it; returns the number of tokens."""

    async def complete(index: int) -> int:
        request = EngineRequest(
            request_id=f"{batch.seed}/{index}",
            prompt=tuple(batch.prompt(index)),
            sampling=Sampling(max_tokens=batch.max_tokens, ignore_eos=True),
            logprobs=True,
        )
        tokens = 0
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                tokens += len(event.token_ids) if isinstance(event, Tokens) else 0
        return tokens

    return sum(await asyncio.gather(*[complete(index) for index in range(batch.size)]))


async def serve_batches(argv: list[str]) -> None:
    """Answers every line of standard input."""
    config = parse(argv)
    engine = await engine_factory(config.engine)(config)
    # Engines write to standard output too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        print(json.dumps({"vocab_size": engine.info.model.vocab_size}), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            batch = Batch(**json.loads(line))
            began = time.perf_counter()
            tokens = await run_batch(engine, batch)
            rate = tokens / (time.perf_counter() - began)
            print(json.dumps({"tokens_per_s": rate, "tokens": tokens}), file=answers, flush=True)
    finally:
        await engine.aclose()


if __name__ == "__main__":
    uvloop.run(serve_batches(sys.argv[1:]))
