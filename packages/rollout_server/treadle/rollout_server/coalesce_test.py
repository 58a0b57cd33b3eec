import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.coalesce import Coalescer
from treadle.rollout_server.engine import EngineEvent, Finished, FinishReason, Started, Tokens
from treadle.rollout_server.testing import FakeClock

END = Finished(FinishReason.LENGTH)


class Source:
    """An engine whose events come when the test says so."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()
        self.closed = asyncio.Event()

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        try:
            while True:
                event = await self.queue.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                self.queue.task_done()
                if isinstance(event, Finished):
                    return
        finally:
            self.closed.set()


def coalescer(source: Source, clock: FakeClock) -> Coalescer:
    return Coalescer(source.events(), max_tokens=4, max_wait_s=0.05, clock=clock)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), max_size=12))
def test_tokens_come_out_as_they_went_in(runs: list[tuple[int, int]]) -> None:
    pieces: list[Tokens] = []
    for count, step in runs:
        start = sum(len(piece.token_ids) for piece in pieces)
        version = (pieces[-1].weight_version if pieces else 0) + step
        ids = tuple(range(start, start + count))
        pieces.append(Tokens(ids, tuple(-float(i) for i in ids), version))

    async def through() -> list[EngineEvent]:
        source = Source()
        inputs: list[EngineEvent] = [Started(3), *pieces, END]
        for event in inputs:
            source.queue.put_nowait(event)
        async with coalescer(source, FakeClock()) as events:
            return [event async for event in events]

    first, *chunks, last = asyncio.run(through())
    assert (first, last) == (Started(3), END)
    sent = [
        (token_id, logprob, chunk.weight_version)
        for chunk in chunks
        if isinstance(chunk, Tokens)
        for token_id, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True)
    ]
    given_in = [
        (token_id, logprob, piece.weight_version)
        for piece in pieces
        for token_id, logprob in zip(piece.token_ids, piece.logprobs, strict=True)
    ]
    assert sent == given_in


@pytest.mark.asyncio
async def test_the_oldest_token_waits_for_its_time_and_no_longer() -> None:
    clock, source = FakeClock(), Source()
    async with coalescer(source, clock) as events:
        source.queue.put_nowait(Tokens((1,), (), 0))
        await source.queue.join()
        reading = asyncio.ensure_future(anext(events))
        clock.advance(0.04)
        source.queue.put_nowait(Tokens((2,), (), 0))
        await source.queue.join()
        assert not reading.done()
        clock.advance(0.01)
        assert await reading == Tokens((1, 2), (), 0)


@pytest.mark.asyncio
async def test_leaving_early_closes_the_source() -> None:
    source = Source()
    async with coalescer(source, FakeClock()) as events:
        source.queue.put_nowait(Started(0))
        assert await anext(events) == Started(0)
    assert source.closed.is_set()


@pytest.mark.asyncio
async def test_an_error_comes_after_the_tokens_before_it() -> None:
    source = Source()
    source.queue.put_nowait(Tokens((1,), (), 0))
    source.queue.put_nowait(RuntimeError("broken"))
    async with coalescer(source, FakeClock()) as events:
        assert await anext(events) == Tokens((1,), (), 0)
        with pytest.raises(RuntimeError, match="broken"):
            await anext(events)
