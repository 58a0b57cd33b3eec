"""Runs an engine in its process without a server, for comparison in `engine_server_ratio`.

Takes the options of the server, so both have the same engine. For each line of JSON on standard
input (see `Batch`) it runs that many completions concurrently and prints the token rate.
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
    """Completions that run concurrently.

    Attributes:
        seed: Seed of the prompts and of sampling.
        size: Number of completions.
        prompt_tokens: Number of tokens per prompt.
        max_tokens: Number of tokens per completion; all of them are sampled.
        vocab_size: Upper bound of prompt ids.
    """

    seed: int
    size: int
    prompt_tokens: int
    max_tokens: int
    vocab_size: int

    def prompt(self, index: int) -> list[int]:
        """Returns one prompt, which depends only on the batch and the index."""
        draw = Random(self.seed << 16 | index)
        return [draw.randrange(4, self.vocab_size) for _ in range(self.prompt_tokens)]


async def run_batch(engine: Engine, batch: Batch) -> int:
    """Runs a batch; returns the number of tokens."""

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
    """Runs a batch for every line of standard input."""
    config = parse(argv)
    engine = await engine_factory(config.engine)(config)
    # Engines also write to standard output.
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
