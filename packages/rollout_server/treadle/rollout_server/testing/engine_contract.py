# ruff: noqa: D102  (a test's name says what it shows)
"""The engine contract: what every `Engine` must do, as tests to inherit.

    class TestMyEngine(EngineContract):
        @asynccontextmanager
        async def engine(self, weights=0):
            engine = MyEngine(weights_of(weights))
            yield engine
            await engine.aclose()

        def weights(self, which):
            return [NamedTensor(...), ...]

Needs a vocabulary of at least 32 ids and a context of at least 512 tokens; a long
completion should take more than a few event-loop turns.
"""

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

import pytest

from treadle.rollout_server.engine import (
    Engine,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    MemoryKind,
    NamedTensor,
    Sampling,
    Started,
    Tokens,
)
from treadle.rollout_server.errors import TensorMismatch

LONG = 300
"""Tokens of a completion that must still run when something happens to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Everything that one sequence yielded."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    cached_prompt_tokens: int
    reason: FinishReason


class Reader:
    """Reads one sequence in a task, and tells when its first tokens are there."""

    def __init__(self, engine: Engine, request: EngineRequest) -> None:
        self._first = asyncio.Event()
        self._task = asyncio.create_task(self._read(engine, request))

    async def first_tokens(self) -> None:
        """Waits until the sequence has yielded tokens."""
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait({first, self._task}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        assert self._first.is_set(), "the sequence ended without tokens"

    @property
    def done(self) -> bool:
        """Whether the sequence ended."""
        return self._task.done()

    async def output(self) -> Output:
        """Waits for the end of the sequence."""
        return await self._task

    async def abort(self) -> None:
        """Cancels the reading task and waits for its end."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _read(self, engine: Engine, request: EngineRequest) -> Output:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        started: Started | None = None
        reason: FinishReason | None = None
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                assert reason is None, f"{event} came after the end"
                match event:
                    case Started():
                        assert started is None, "started twice"
                        started = event
                    case Tokens():
                        assert started is not None and event.token_ids
                        token_ids.extend(event.token_ids)
                        logprobs.extend(event.logprobs)
                        versions.extend([event.weight_version] * len(event.token_ids))
                        self._first.set()
                    case Finished():
                        reason = event.reason
        assert started is not None and reason is not None, "the stream ended without Finished"
        return Output(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            cached_prompt_tokens=started.cached_prompt_tokens,
            reason=reason,
        )


async def stream(tensors: Sequence[NamedTensor]) -> AsyncIterator[NamedTensor]:
    """`tensors` as `Engine.load_weights` wants them."""
    for tensor in tensors:
        yield tensor


async def update(engine: Engine, tensors: Sequence[NamedTensor], version: int) -> None:
    """Loads weights with nothing in flight."""
    await engine.pause(InFlightPolicy.DRAIN)
    await engine.load_weights(stream(tensors), version=version)
    await engine.resume()


def request(
    prompt: Sequence[int] = (5, 9, 13, 2),
    *,
    logprobs: bool = True,
    name: str = "r",
    **sampling: object,
) -> EngineRequest:
    """A greedy request of 16 tokens that ignores end of sequence, unless told otherwise."""
    values = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=Sampling(**values),  # type: ignore[arg-type]
        logprobs=logprobs,
    )


async def run(engine: Engine, wanted: EngineRequest) -> Output:
    """One sequence from start to end."""
    return await Reader(engine, wanted).output()


@pytest.mark.asyncio
class EngineContract:
    """Inherit, name the subclass `Test...`, and give it these two."""

    @abstractmethod
    def engine(self, weights: int = 0) -> AbstractAsyncContextManager[Engine]:
        """A fresh engine that holds weight set 0 or 1, at version 0."""

    @abstractmethod
    def weights(self, which: int) -> Sequence[NamedTensor]:
        """Weight set 0 or 1; they lead to different greedy completions."""

    async def test_greedy_repeats(self) -> None:
        async with self.engine() as engine:
            first, second = await run(engine, request()), await run(engine, request())
        assert first.token_ids == second.token_ids
        assert set(first.logprobs) == {0.0}

    async def test_seeds_repeat_and_differ(self) -> None:
        async with self.engine() as engine:
            outputs = [
                (await run(engine, request(temperature=1.0, seed=seed))).token_ids
                for seed in (1, 1, 2)
            ]
        assert outputs[0] == outputs[1] != outputs[2]

    async def test_unseeded_sequences_differ(self) -> None:
        async with self.engine() as engine:
            outputs = {(await run(engine, request(temperature=1.0))).token_ids for _ in range(4)}
        assert len(outputs) > 1

    async def test_a_seeded_sequence_goes_on_from_its_middle(self) -> None:
        wanted = request(temperature=1.0, seed=7, max_tokens=12)
        async with self.engine() as engine:
            whole = await run(engine, wanted)
            prompt = wanted.prompt + whole.token_ids[:5]
            rest = await run(engine, request(prompt, temperature=1.0, seed=7, max_tokens=7))
        assert whole.token_ids[5:] == rest.token_ids

    async def test_logprobs_are_as_many_as_tokens_and_never_positive(self) -> None:
        async with self.engine() as engine:
            assert engine.info.capabilities.sampled_logprobs
            output = await run(engine, request(temperature=1.0, seed=3))
            bare = await run(engine, request(temperature=1.0, seed=3, logprobs=False))
        assert len(output.logprobs) == len(output.token_ids) == 16
        assert all(logprob <= 0.0 for logprob in output.logprobs)
        assert any(logprob < 0.0 for logprob in output.logprobs)
        assert bare.logprobs == () and bare.token_ids == output.token_ids

    async def test_top_k_of_one_is_greedy(self) -> None:
        async with self.engine() as engine:
            greedy = await run(engine, request())
            narrow = await run(engine, request(temperature=1.0, top_k=1, seed=1))
        assert narrow.token_ids == greedy.token_ids
        assert narrow.logprobs == pytest.approx([0.0] * 16)

    async def test_a_repetition_penalty_turns_away_from_what_was_seen(self) -> None:
        async with self.engine() as engine:
            favourite = (await run(engine, request(max_tokens=1))).token_ids[0]
            prompt = (favourite, *request().prompt)
            plain = await run(engine, request(prompt, max_tokens=LONG))
            penalised = await run(engine, request(prompt, max_tokens=LONG, repetition_penalty=1e9))
        assert len(set(penalised.token_ids)) >= len(set(plain.token_ids))

    async def test_max_tokens_ends_with_length(self) -> None:
        async with self.engine() as engine:
            output = await run(engine, request(max_tokens=5))
        assert (len(output.token_ids), output.reason) == (5, FinishReason.LENGTH)

    async def test_a_stop_id_is_the_last_token(self) -> None:
        async with self.engine() as engine:
            free = (await run(engine, request())).token_ids
            stop = free[7]
            output = await run(engine, request(stop_token_ids=frozenset({stop})))
        assert output.token_ids == free[: free.index(stop) + 1]
        assert output.reason is FinishReason.STOP

    async def test_end_of_sequence_stops_unless_ignored(self) -> None:
        async with self.engine() as engine:
            eos = engine.info.model.eos_token_ids
            ends = [
                await run(engine, request(temperature=2.0, seed=seed, ignore_eos=False))
                for seed in range(8)
            ]
        for output in ends:
            assert not eos.intersection(output.token_ids[:-1])
            stopped = bool(output.token_ids and output.token_ids[-1] in eos)
            assert (output.reason is FinishReason.STOP) == stopped

    async def test_many_at_once_give_what_each_gives_alone(self) -> None:
        wanted = [
            request((3, index, index + 1)[: 2 + index % 2], temperature=index % 2, seed=index)
            for index in range(24)
        ]
        async with self.engine() as engine:
            readers = [Reader(engine, one) for one in wanted]
            together = [(await reader.output()).token_ids for reader in readers]
            alone = [(await run(engine, one)).token_ids for one in wanted[:6]]
            counters = engine.counters
        assert together[:6] == alone
        assert (counters.running, counters.aborted) == (0, 0)
        assert counters.started == counters.finished == 30

    async def test_cancelling_frees_the_sequence(self) -> None:
        async with self.engine() as engine:
            reader = Reader(engine, request(max_tokens=LONG))
            await reader.first_tokens()
            await reader.abort()
            # The pause waits for whatever still runs, so the count afterwards is settled.
            await engine.pause(InFlightPolicy.DRAIN)
            assert (engine.counters.running, engine.counters.aborted) == (0, 1)
            await engine.resume()
            assert (await run(engine, request())).reason is FinishReason.LENGTH

    async def test_a_cached_prefix_is_counted_and_changes_nothing(self) -> None:
        prompt = tuple(range(1, 31)) * 3
        async with self.engine() as engine:
            cold = await run(engine, request(prompt))
            warm = await run(engine, request(prompt))
        assert cold.cached_prompt_tokens == 0
        assert 0 <= warm.cached_prompt_tokens < len(prompt)
        assert warm.token_ids == cold.token_ids

    async def test_an_update_equals_a_fresh_engine(self) -> None:
        prompt = tuple(range(1, 31)) * 3
        async with self.engine(weights=1) as fresh:
            wanted = await run(fresh, request(prompt))
        async with self.engine() as engine:
            before = await run(engine, request(prompt))
            await update(engine, self.weights(1), 3)
            assert engine.weight_version == 3
            after = await run(engine, request(prompt))
        assert before.token_ids != wanted.token_ids == after.token_ids
        assert after.cached_prompt_tokens == 0
        assert set(before.versions) == {0} and set(after.versions) == {3}

    async def test_a_refused_update_keeps_the_old_weights(self) -> None:
        async with self.engine() as engine:
            if engine.info.parameters is None:
                pytest.skip("this engine takes any tensors")
            before = await run(engine, request())
            await engine.pause(InFlightPolicy.DRAIN)
            with pytest.raises(TensorMismatch):
                await engine.load_weights(stream(self.weights(1)[:-1]), version=3)
            await engine.resume()
            after = await run(engine, request())
        assert (after.token_ids, after.versions) == (before.token_ids, before.versions)

    async def test_drain_lets_sequences_finish_and_starts_none(self) -> None:
        async with self.engine() as engine:
            reader = Reader(engine, request(max_tokens=LONG))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.DRAIN)
            late = Reader(engine, request())
            first = await reader.output()
            assert not late.done
            await engine.load_weights(stream(self.weights(1)), version=2)
            await engine.resume()
            second = await late.output()
        assert (len(first.token_ids), first.reason) == (LONG, FinishReason.LENGTH)
        assert set(first.versions) == {0} and set(second.versions) == {2}

    async def test_interrupt_ends_sequences_with_what_they_have(self) -> None:
        async with self.engine() as engine:
            reader = Reader(engine, request(max_tokens=LONG))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.INTERRUPT)
            output = await reader.output()
            await engine.resume()
            whole = await run(engine, request(max_tokens=LONG))
        assert output.reason is FinishReason.INTERRUPTED
        assert 1 <= len(output.token_ids) < LONG
        assert whole.token_ids[: len(output.token_ids)] == output.token_ids

    async def test_continue_goes_on_with_the_new_weights(self) -> None:
        async with self.engine() as engine:
            if not engine.info.capabilities.in_flight_continue:
                pytest.skip("this engine cannot continue")
            reader = Reader(engine, request(max_tokens=LONG))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.CONTINUE)
            assert not reader.done
            await engine.load_weights(stream(self.weights(1)), version=2)
            await engine.resume()
            output = await reader.output()
        assert (len(output.token_ids), output.reason) == (LONG, FinishReason.LENGTH)
        assert sorted(output.versions) == list(output.versions)
        assert set(output.versions) == {0, 2}

    async def test_what_continue_kept_can_still_be_interrupted(self) -> None:
        async with self.engine() as engine:
            if not engine.info.capabilities.in_flight_continue:
                pytest.skip("this engine cannot continue")
            reader = Reader(engine, request(max_tokens=LONG))
            await reader.first_tokens()
            await engine.pause(InFlightPolicy.CONTINUE)
            await engine.pause(InFlightPolicy.INTERRUPT)
            output = await reader.output()
        assert output.reason is FinishReason.INTERRUPTED

    async def test_released_memory_comes_back_as_it_was(self) -> None:
        async with self.engine() as engine:
            if not engine.info.capabilities.release_memory:
                pytest.skip("this engine cannot release memory")
            before = await run(engine, request())
            await engine.pause(InFlightPolicy.DRAIN)
            await engine.release_memory(frozenset(MemoryKind))
            await engine.restore_memory(frozenset(MemoryKind))
            await engine.resume()
            after = await run(engine, request())
        assert after.token_ids == before.token_ids

    async def test_closing_ends_what_runs(self) -> None:
        async with self.engine() as engine:
            reader = Reader(engine, request(max_tokens=LONG))
            await reader.first_tokens()
            await engine.aclose()
            output = await reader.output()
            await engine.aclose()
        assert output.reason is FinishReason.INTERRUPTED
