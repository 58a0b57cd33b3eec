import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import EngineEvent, Finished, FinishReason, Started, Tokens
from treadle.rollout_server.services.coalesce import MAX_READY, Coalescer
from treadle.rollout_server.testing import FakeClock

END = Finished(FinishReason.LENGTH)


class Sent:
    """What was sent, by a sender that the test may keep busy."""

    def __init__(self) -> None:
        self.batches: asyncio.Queue[Sequence[EngineEvent]] = asyncio.Queue()
        self.free = asyncio.Event()
        self.free.set()

    async def send(self, events: Sequence[EngineEvent]) -> None:
        self.batches.put_nowait(events)
        await self.free.wait()

    def coalescer(self, clock: FakeClock) -> Coalescer:
        return Coalescer(self.send, max_tokens=4, max_wait_s=0.05, clock=clock)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2), st.booleans()), max_size=12))
def test_tokens_come_out_as_they_went_in(runs: list[tuple[int, int, bool]]) -> None:
    pieces: list[Tokens] = []
    for count, step, _ in runs:
        start = sum(len(piece.token_ids) for piece in pieces)
        version = (pieces[-1].weight_version if pieces else 0) + step
        ids = tuple(range(start, start + count))
        routed = bytes(ids)[: count - step]  # as many as tokens, or fewer
        pieces.append(Tokens(ids, tuple(-float(i) for i in ids), version, routed))

    async def through() -> list[EngineEvent]:
        sent = Sent()
        async with sent.coalescer(FakeClock()) as coalescer:
            coalescer.add(Started(3))
            for piece, (_, _, waits) in zip(pieces, runs, strict=True):
                coalescer.add(piece)
                if waits:
                    await asyncio.sleep(0)
            coalescer.add(END)
            rest = await coalescer.rest()
        batches = [sent.batches.get_nowait() for _ in range(sent.batches.qsize())]
        return [event for batch in (*batches, rest) for event in batch]

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
    routed = b"".join(c.routed_experts for c in chunks if isinstance(c, Tokens))
    assert routed == b"".join(piece.routed_experts for piece in pieces)


@pytest.mark.asyncio
async def test_the_oldest_token_waits_for_its_time_and_no_longer() -> None:
    clock, sent = FakeClock(), Sent()
    async with sent.coalescer(clock) as coalescer:
        coalescer.add(Tokens((0,), (), 0))
        assert await sent.batches.get() == [Tokens((0,), (), 0)], "the first ones do not wait"
        coalescer.add(Tokens((1,), (), 0))
        clock.advance(0.04)
        coalescer.add(Tokens((2,), (), 0))
        assert clock.next_timer is not None
        clock.advance(0.01)
        assert await sent.batches.get() == [Tokens((1, 2), (), 0)]
        assert clock.next_timer is None


@pytest.mark.asyncio
async def test_a_completion_that_never_waits_is_not_sent_but_left() -> None:
    sent = Sent()
    whole: list[EngineEvent] = [Started(0), Tokens((1, 2, 3, 4), (), 0), Tokens((5,), (), 0), END]
    async with sent.coalescer(FakeClock()) as coalescer:
        for event in whole:
            coalescer.add(event)
        assert await coalescer.rest() == whole
    assert sent.batches.empty()


@pytest.mark.asyncio
async def test_what_comes_during_a_send_leaves_after_it_and_together() -> None:
    sent = Sent()
    sent.free.clear()
    async with sent.coalescer(FakeClock()) as coalescer:
        coalescer.add(Started(0))
        assert await sent.batches.get() == [Started(0)]
        coalescer.add(Tokens((1,), (), 0))
        coalescer.add(Tokens((2,), (), 0))
        coalescer.add(END)
        rest = asyncio.ensure_future(coalescer.rest())
        await asyncio.sleep(0)
        assert not rest.done(), "the send before it is in progress"
        sent.free.set()
        assert await rest == [Tokens((1,), (), 0), Tokens((2,), (), 0), END]
    assert sent.batches.empty()


@pytest.mark.asyncio
async def test_leaving_early_ends_the_send() -> None:
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def send(events: Sequence[EngineEvent]) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with Coalescer(send, max_tokens=4, max_wait_s=0.05, clock=FakeClock()) as coalescer:
        coalescer.add(Started(0))
        await begun.wait()
    assert ended.is_set()


@pytest.mark.asyncio
async def test_an_error_comes_after_what_came_before_it() -> None:
    sent = Sent()
    sent.free.clear()
    whole: list[EngineEvent] = [Started(0), *(Tokens((i,), (), 0) for i in range(3))]

    async def fail() -> None:
        async with sent.coalescer(FakeClock()) as coalescer:
            coalescer.add(whole[0])
            assert await sent.batches.get() == whole[:1]
            for tokens in whole[1:]:
                coalescer.add(tokens)
            failing.set()
            raise RuntimeError("the engine is gone")

    failing = asyncio.Event()
    failed = asyncio.create_task(fail())
    await failing.wait()
    assert not failed.done(), "the send before it is in progress"
    sent.free.set()
    with pytest.raises(RuntimeError, match="engine is gone"):
        await failed
    assert sent.batches.get_nowait() == [whole[1], Tokens((1, 2), (), 0)]
    assert sent.batches.empty()


@pytest.mark.asyncio
async def test_cancelled_it_does_not_wait_for_the_send_that_an_error_waits_for() -> None:
    sent = Sent()
    sent.free.clear()

    async def fail() -> None:
        async with sent.coalescer(FakeClock()) as coalescer:
            coalescer.add(Started(0))
            await sent.batches.get()
            failing.set()
            raise RuntimeError("the engine is gone")

    failing = asyncio.Event()
    failed = asyncio.create_task(fail())
    await failing.wait()
    failed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await failed


@pytest.mark.asyncio
async def test_leaving_before_the_send_begins_sends_nothing() -> None:
    clock, sent = FakeClock(), Sent()
    async with sent.coalescer(clock) as coalescer:
        coalescer.add(Started(0))
        coalescer.add(Tokens((1,), (), 0))
        coalescer.add(Tokens((2,), (), 0))
    await asyncio.sleep(0)
    assert sent.batches.empty() and clock.next_timer is None


@pytest.mark.asyncio
@pytest.mark.parametrize("fails_before_the_end", [True, False])
async def test_a_send_that_fails_raises_in_add_and_in_rest(
    fails_before_the_end: bool,
) -> None:
    begun, fail = asyncio.Event(), asyncio.Event()

    async def send(events: Sequence[EngineEvent]) -> None:
        begun.set()
        await fail.wait()
        raise RuntimeError("gone")

    async with Coalescer(send, max_tokens=4, max_wait_s=0.05, clock=FakeClock()) as coalescer:
        coalescer.add(Started(0))
        await begun.wait()
        if fails_before_the_end:
            fail.set()
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="gone"):
                coalescer.add(END)
        else:
            coalescer.add(END)
            fail.set()
            with pytest.raises(RuntimeError, match="gone"):
                await coalescer.rest()


@pytest.mark.asyncio
async def test_no_more_comes_together_than_a_message_holds() -> None:
    tokens = Tokens((1, 2, 3, 4), (), 0)
    sent = Sent()
    sent.free.clear()
    async with sent.coalescer(FakeClock()) as coalescer:
        coalescer.add(Started(0))
        sizes = [len(await sent.batches.get())]
        for _ in range(MAX_READY + 1):
            coalescer.add(tokens)
        sent.free.set()
        sizes += [len(await sent.batches.get()), len(await sent.batches.get())]
        for _ in range(2 * MAX_READY + 3):
            coalescer.add(tokens)
        coalescer.add(END)
        left = await coalescer.rest()
        sizes += [len(sent.batches.get_nowait()) for _ in range(sent.batches.qsize())]
    assert sizes == [1, MAX_READY, 1, MAX_READY, MAX_READY]
    assert left == [tokens] * 3 + [END]


@pytest.mark.asyncio
async def test_an_engine_that_does_not_say_that_it_finished_is_a_bug() -> None:
    async with Sent().coalescer(FakeClock()) as coalescer:
        coalescer.add(Tokens((1,), (), 0))
        with pytest.raises(AssertionError, match="without Finished"):
            await coalescer.rest()


@pytest.mark.asyncio
@pytest.mark.parametrize("late", [Tokens((1,), (), 0), END])
async def test_an_engine_that_goes_on_after_it_finished_is_a_bug(late: EngineEvent) -> None:
    async with Sent().coalescer(FakeClock()) as coalescer:
        coalescer.add(END)
        with pytest.raises(AssertionError, match="after Finished"):
            coalescer.add(late)
