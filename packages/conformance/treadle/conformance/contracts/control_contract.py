# ruff: noqa: D102  (a test's name says what it shows)
"""The control part of the engine contract: batching, cancellation, caches, pauses and memory."""

import asyncio

import pytest

from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import (
    FEW_CANDIDATES,
    TRIES,
    Reader,
    counters_since,
    pause_midway,
    random_prompt,
    request,
    run,
    run_all,
)
from treadle.rollout_server.engine import Engine, FinishReason, InFlightPolicy, MemoryKind


@pytest.mark.asyncio
class ControlContract(ContractBase):
    """See `ContractBase`."""

    async def test_many_at_once_give_what_each_gives_alone(self) -> None:
        wanted = [
            request((3, index, index + 1)[: 2 + index % 2], temperature=index % 2, seed=index)
            for index in range(24)
        ]
        async with self.engine() as engine:
            before = engine.counters
            together = [output.token_ids for output in await run_all(engine, wanted)]
            alone = [(await run(engine, one)).token_ids for one in wanted[:6]]
            counters = counters_since(before, engine.counters)
        assert together[:6] == alone
        assert (counters.running, counters.aborted) == (0, 0)
        assert counters.started == counters.finished == 30

    async def test_cancelling_frees_the_sequence(self) -> None:
        async with self.engine() as engine:
            before = engine.counters
            for _ in range(TRIES):
                reader = Reader(engine, request(max_tokens=self.long))
                await reader.first_tokens()
                await reader.abort()
                # The pause waits for what still runs, so the count is final afterwards.
                await engine.pause(InFlightPolicy.DRAIN)
                counters = counters_since(before, engine.counters)
                assert counters.running == 0
                await engine.resume()
                if counters.aborted:
                    break
            assert counters.aborted == 1, "the sequence ran to its end after it was cancelled"
            assert (await run(engine, request())).reason is FinishReason.LENGTH

    async def test_cancelling_one_of_many_leaves_the_others(self) -> None:
        wanted = [request((7, index), max_tokens=40) for index in range(6)]
        async with self.engine() as engine:
            alone = (await run(engine, wanted[1])).token_ids
            before = engine.counters
            readers = [Reader(engine, one) for one in wanted]
            for reader in readers[::2]:
                await reader.first_tokens()
                await reader.abort()
            others = [await reader.output() for reader in readers[1::2]]
            await engine.pause(InFlightPolicy.DRAIN)
            counters = counters_since(before, engine.counters)
            await engine.resume()
        assert others[0].token_ids == alone
        assert {len(output.token_ids) for output in others} == {40}
        assert (counters.running, counters.started) == (0, 6)
        assert counters.finished + counters.aborted == 6 and counters.finished >= 3

    async def test_a_cached_prefix_is_counted_and_changes_nothing(self) -> None:
        prompt = tuple(range(1, 31)) * 3
        async with self.engine() as engine:
            cold = await run(engine, request(prompt))
            warm = await run(engine, request(prompt))
        assert cold.cached_prompt_tokens == 0 or not self.fresh
        assert cold.cached_prompt_tokens <= warm.cached_prompt_tokens < len(prompt)
        assert warm.token_ids == cold.token_ids

    async def test_a_second_turn_finds_the_first_in_the_cache(self) -> None:
        async with self.engine() as engine:
            skip_unless(self.caches_prefixes, "this engine has no prefix cache")
            vocab_size = engine.info.model.vocab_size
            prompt = random_prompt(self.turn_tokens, vocab_size, seed=2)
            first = await run(engine, request(prompt, max_tokens=8))
            turn = prompt + first.token_ids + random_prompt(12, vocab_size, seed=3)
            second = await run(engine, request(turn, seed=4, **FEW_CANDIDATES))
            again = await run(engine, request(turn, seed=4, **FEW_CANDIDATES))
        assert first.cached_prompt_tokens == 0 or not self.fresh
        assert second.cached_prompt_tokens >= self.turn_tokens // 2
        assert second.cached_prompt_tokens < len(turn)
        assert again.token_ids == second.token_ids
        assert again.logprobs == pytest.approx(second.logprobs, abs=self.logprob_tolerance)

    async def test_the_higher_priority_runs_first(self) -> None:
        async with self.engine() as engine:
            places = self.places or 0
            skip_unless(engine.info.capabilities.priority, "this engine has no priorities")
            skip_unless(places > 0, "the number of sequences it runs at once is unknown")
            # The first ends long before the others and frees the only slot.
            most = engine.info.model.context_length - 8
            lengths = [most // 2, *[most] * (places - 1)]
            for _ in range(TRIES):  # It may end before all three are queued.
                order = await self._order_of_priorities(engine, lengths)
                if order == ["high", "middle", "low"]:
                    break
        assert order == ["high", "middle", "low"]

    async def _order_of_priorities(self, engine: Engine, lengths: list[int]) -> list[str]:
        """Returns the order in which sequences end that arrive while others of `lengths` run."""
        busy = [Reader(engine, request((9, n), max_tokens=m)) for n, m in enumerate(lengths)]
        for reader in busy:
            await reader.first_tokens()
        order: list[str] = []

        async def one(name: str, priority: int) -> None:
            await run(engine, request((8, 4), name=name, priority=priority, max_tokens=1))
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for name, priority in (("low", -1), ("middle", 0), ("high", 1)):
                group.create_task(one(name, priority))
        for reader in busy:
            await reader.abort()
        return order

    async def test_interrupt_ends_sequences_with_what_they_have(self) -> None:
        async with self.engine() as engine:
            for _ in range(TRIES):
                before = engine.counters
                readers = [Reader(engine, request((5, n), max_tokens=self.long)) for n in range(3)]
                for reader in readers:
                    await reader.first_tokens()
                await engine.pause(InFlightPolicy.INTERRUPT)
                outputs = [await reader.output() for reader in readers]
                await engine.resume()
                if all(len(output.token_ids) < self.long for output in outputs):
                    break
            whole = await run(engine, request((5, 0), max_tokens=self.long))
            counters = counters_since(before, engine.counters)
        for output in outputs:
            assert output.reason is FinishReason.INTERRUPTED
            assert 1 <= len(output.token_ids) < self.long
        begun = outputs[0].token_ids
        assert whole.token_ids[: len(begun)] == begun
        assert (counters.finished, counters.aborted, counters.running) == (4, 0, 0)

    async def test_what_continue_kept_goes_on_as_if_nothing_had_been(self) -> None:
        wanted = request(temperature=1.0, seed=6, max_tokens=self.long)
        async with self.engine() as engine:
            skip_unless(engine.info.capabilities.in_flight_continue, "this engine cannot continue")
            whole = await run(engine, wanted)
            reader = await pause_midway(engine, wanted)
            await engine.resume()
            output = await reader.output()
        assert output.token_ids == whole.token_ids
        assert output.logprobs == pytest.approx(whole.logprobs, abs=self.logprob_tolerance)

    async def test_what_continue_kept_can_still_be_interrupted(self) -> None:
        async with self.engine() as engine:
            skip_unless(engine.info.capabilities.in_flight_continue, "this engine cannot continue")
            reader = await pause_midway(engine, request(max_tokens=self.long))
            await engine.pause(InFlightPolicy.INTERRUPT)
            output = await reader.output()
            await engine.resume()
        assert output.reason is FinishReason.INTERRUPTED

    async def test_what_continue_kept_can_still_be_drained(self) -> None:
        async with self.engine() as engine:
            skip_unless(engine.info.capabilities.in_flight_continue, "this engine cannot continue")
            reader = await pause_midway(engine, request(max_tokens=self.long))
            await engine.pause(InFlightPolicy.DRAIN)
            output = await reader.output()
            await engine.resume()
        assert (len(output.token_ids), output.reason) == (self.long, FinishReason.LENGTH)

    @pytest.mark.parametrize(
        "kinds",
        [frozenset({MemoryKind.WEIGHTS}), frozenset({MemoryKind.KV_CACHE}), frozenset(MemoryKind)],
        ids=["weights", "kv_cache", "both"],
    )
    async def test_released_memory_comes_back_as_it_was(self, kinds: frozenset[MemoryKind]) -> None:
        wanted = request(tuple(range(1, 31)) * 3, temperature=1.0, seed=8)
        async with self.engine() as engine:
            skip_unless(
                engine.info.capabilities.release_memory, "this engine cannot release memory"
            )
            before = await run(engine, wanted)
            await engine.pause(InFlightPolicy.DRAIN)
            await engine.release_memory(kinds)
            await engine.release_memory(kinds)
            await engine.restore_memory(kinds)
            await engine.resume()
            after = await run(engine, wanted)
        assert (after.token_ids, after.versions) == (before.token_ids, before.versions)
        assert after.logprobs == pytest.approx(before.logprobs, abs=self.logprob_tolerance)

    async def test_an_engine_that_breaks_says_so_while_it_is_idle(self) -> None:
        """Runs last, because the engine is broken afterwards."""
        async with self.engine() as engine:
            watch = asyncio.create_task(engine.wait_failed())
            await run(engine, request())
            assert not watch.done()
            try:
                await self.break_engine(engine)
                assert isinstance(await watch, Exception)
            finally:
                watch.cancel()
