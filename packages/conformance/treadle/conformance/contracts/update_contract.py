# ruff: noqa: D102  (a test's name says what it shows)
"""The update part of the engine contract: weights switch as a whole, and versions label tokens.

Versions count from the one that serves when the test begins, because one server may run many
tests.
"""

from collections.abc import AsyncIterator, Sequence

import pytest

from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import (
    Output,
    Reader,
    pause_midway,
    random_prompt,
    request,
    run,
    stream,
    update,
)
from treadle.rollout_server.engine import (
    Engine,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
)

PROMPT = tuple(range(1, 31)) * 3


class Torn(Exception):
    """Raised by a stream of tensors that breaks off."""


async def torn(tensors: Sequence[NamedTensor]) -> AsyncIterator[NamedTensor]:
    """Yields one tensor, then raises `Torn`."""
    yield tensors[0]
    raise Torn


@pytest.mark.asyncio
class UpdateContract(ContractBase):
    """See `ContractBase`."""

    async def _expected(self, which: int) -> Output:
        async with self.engine(weights=which) as engine:
            return await run(engine, request(PROMPT))

    async def test_an_update_equals_a_fresh_engine(self) -> None:
        wanted = await self._expected(1)
        async with self.engine() as engine:
            base = engine.weight_version
            before = await run(engine, request(PROMPT))
            await update(engine, self.weights(1), base + 3)
            assert engine.weight_version == base + 3
            after = await run(engine, request(PROMPT))
        assert before.token_ids != wanted.token_ids, "both sets of weights give the same tokens"
        assert after.token_ids == wanted.token_ids
        assert after.cached_prompt_tokens == 0, "the cache served what old weights computed"
        assert set(before.versions) == {base} and set(after.versions) == {base + 3}

    async def test_tensors_may_come_in_any_order(self) -> None:
        wanted = await self._expected(1)
        async with self.engine() as engine:
            await update(engine, list(self.weights(1))[::-1], engine.weight_version + 1)
            assert (await run(engine, request(PROMPT))).token_ids == wanted.token_ids

    async def test_an_update_in_place_equals_a_fresh_engine(self) -> None:
        wanted = await self._expected(1)
        async with self.engine() as engine:
            skip_unless(self.takes_in_place(engine), "this server takes no updates in place")
            version = engine.weight_version + 1
            await run(engine, request(PROMPT))
            await engine.pause(InFlightPolicy.DRAIN)
            tensors = stream(self.weights(1))
            await engine.load_weights(tensors, version=version, in_place=True)
            await engine.resume()
            after = await run(engine, request(PROMPT))
        assert after.token_ids == wanted.token_ids
        assert after.cached_prompt_tokens == 0
        assert set(after.versions) == {version}

    async def test_a_torn_update_in_place_is_mended_by_a_whole_one(self) -> None:
        """A request between the updates waits, so that nothing is sampled from mixed weights."""
        wanted = await self._expected(1)
        async with self.engine() as engine:
            skip_unless(self.takes_in_place(engine), "this server takes no updates in place")
            version = engine.weight_version + 2
            await engine.pause(InFlightPolicy.DRAIN)
            with pytest.raises(Torn):
                tensors = torn(self.weights(1))
                await engine.load_weights(tensors, version=version - 1, in_place=True)
            late = Reader(engine, request(PROMPT))
            tensors = stream(self.weights(1))
            await engine.load_weights(tensors, version=version, in_place=True)
            assert not late.done
            await engine.resume()
            output = await late.output()
        assert output.token_ids == wanted.token_ids
        assert set(output.versions) == {version}

    async def test_drain_lets_sequences_finish_and_starts_none(self) -> None:
        async with self.engine() as engine:
            base = engine.weight_version
            reader = Reader(engine, request(max_tokens=self.long))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.DRAIN)
            late = Reader(engine, request())
            first = await reader.output()
            assert not late.done
            await engine.load_weights(stream(self.weights(1)), version=base + 2)
            await engine.resume()
            second = await late.output()
        assert (len(first.token_ids), first.reason) == (self.long, FinishReason.LENGTH)
        assert set(first.versions) == {base} and set(second.versions) == {base + 2}

    async def test_continue_goes_on_with_the_new_weights(self) -> None:
        async with self.engine() as engine:
            skip_unless(engine.info.capabilities.in_flight_continue, "this engine cannot continue")
            base = engine.weight_version
            whole = await run(engine, request(max_tokens=self.long))
            reader = await pause_midway(engine, request(max_tokens=self.long))
            await engine.load_weights(stream(self.weights(1)), version=base + 2)
            await engine.resume()
            output = await reader.output()
        assert (len(output.token_ids), output.reason) == (self.long, FinishReason.LENGTH)
        assert sorted(output.versions) == list(output.versions)
        assert set(output.versions) == {base, base + 2}
        old = output.versions.count(base)
        assert output.token_ids[:old] == whole.token_ids[:old]
        assert output.token_ids[old:] != whole.token_ids[old:], "the old weights went on"

    async def test_new_weights_come_between_weights_and_cache(self) -> None:
        """Memory is restored in steps: weights first, then the update, the KV cache last."""
        wanted = await self._expected(1)
        async with self.engine() as engine:
            skip_unless(
                engine.info.capabilities.release_memory, "this engine cannot release memory"
            )
            version = engine.weight_version + 1
            await run(engine, request(PROMPT))
            await engine.pause(InFlightPolicy.DRAIN)
            await engine.release_memory(frozenset(MemoryKind))
            await engine.restore_memory(frozenset({MemoryKind.WEIGHTS}))
            await engine.load_weights(stream(self.weights(1)), version=version)
            await engine.restore_memory(frozenset({MemoryKind.KV_CACHE}))
            await engine.resume()
            after = await run(engine, request(PROMPT))
        assert after.token_ids == wanted.token_ids
        assert after.cached_prompt_tokens == 0
        assert set(after.versions) == {version}

    async def test_each_of_many_updates_is_the_one_that_serves(self) -> None:
        wanted = [(await self._expected(which)).token_ids for which in (0, 1)]
        async with self.engine() as engine:
            for which in (1, 0, 1):
                version = engine.weight_version + 1
                await update(engine, self.weights(which), version)
                output = await self._after(engine)
                assert output.token_ids == wanted[which]
                assert set(output.versions) == {version}

    async def _after(self, engine: Engine) -> Output:
        # Another sequence with the same prefix keeps the caches in use.
        await run(engine, request(PROMPT[:60] + random_prompt(20, 30), max_tokens=4))
        return await run(engine, request(PROMPT))
