"""Reads sequences of an `Engine`, each in a task, and checks the order of their events.

Invariant: the events of a returned output were one `Started`, perhaps `PromptLogprobs`, then
`Tokens`, then one `Finished`; anything else fails the test.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from treadle.rollout_server.engine import (
    Constraint,
    Engine,
    EngineCounters,
    EngineRequest,
    Finished,
    FinishReason,
    InFlightPolicy,
    NamedTensor,
    PromptLogprobs,
    Sampling,
    Started,
    Tokens,
)

TRIES = 5
"""Number of attempts at something that a fast engine may outrun."""

FEW_CANDIDATES: dict[str, Any] = {"temperature": 1.0, "top_k": 4}
"""Draws among a few likely tokens, which rounding does not decide. It differs between batches and
caches, and may decide draws among all tokens of a large vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Everything that one sequence yielded.

    `versions` has one entry per token, `prompt_versions` one per log-prob of the prompt.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    cached_prompt_tokens: int
    routed_experts: bytes
    sampling_masks: tuple[bytes, ...]
    prompt_logprobs: tuple[float, ...]
    prompt_versions: tuple[int, ...]
    reason: FinishReason


class Reader:
    """Reads one sequence in a task; `first_tokens` waits for its first tokens."""

    def __init__(self, engine: Engine, request: EngineRequest) -> None:
        self._first = asyncio.Event()
        self._task = asyncio.create_task(self._read(engine, request))

    async def first_tokens(self) -> None:
        """Waits until the sequence has yielded tokens."""
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait({first, self._task}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if not self._first.is_set():
            output = await self._task  # Raises what the engine raised.
            raise AssertionError(f"the sequence ended without tokens: {output}")

    @property
    def done(self) -> bool:
        """Whether the sequence has ended."""
        return self._task.done()

    async def output(self) -> Output:
        """Waits for the end of the sequence and returns its output."""
        return await self._task

    async def abort(self) -> None:
        """Cancels the reading task and waits for its end."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _read(self, engine: Engine, request: EngineRequest) -> Output:
        token_ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        routed: list[bytes] = []
        masks: list[bytes] = []
        prompt_logprobs: list[float] = []
        prompt_versions: list[int] = []
        started: Started | None = None
        reason: FinishReason | None = None
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                assert reason is None, f"{event} came after the end"
                match event:
                    case Started():
                        assert started is None, "started twice"
                        started = event
                    case PromptLogprobs():
                        assert started is not None, "log-probs of the prompt came before Started"
                        assert not token_ids, "log-probs of the prompt came after a token"
                        assert event.logprobs, "an event without log-probs"
                        prompt_logprobs.extend(event.logprobs)
                        prompt_versions.extend([event.weight_version] * len(event.logprobs))
                    case Tokens():
                        assert started is not None, "tokens came before Started"
                        routed.append(event.routed_experts)
                        assert event.token_ids or routed[-1], "an event without tokens"
                        wanted = len(event.token_ids) if request.logprobs else 0
                        assert len(event.logprobs) == wanted, (
                            f"{len(event.logprobs)} log-probs came with "
                            f"{len(event.token_ids)} tokens, expected {wanted}"
                        )
                        wanted = len(event.token_ids) if request.sampling_mask else 0
                        assert len(event.sampling_masks) == wanted, (
                            f"{len(event.sampling_masks)} sampling masks came with "
                            f"{len(event.token_ids)} tokens, expected {wanted}"
                        )
                        masks.extend(event.sampling_masks)
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
            routed_experts=b"".join(routed),
            sampling_masks=tuple(masks),
            prompt_logprobs=tuple(prompt_logprobs),
            prompt_versions=tuple(prompt_versions),
            reason=reason,
        )


async def stream(tensors: Sequence[NamedTensor]) -> AsyncIterator[NamedTensor]:
    """Yields `tensors`, as `Engine.load_weights` takes them."""
    for tensor in tensors:
        yield tensor


async def update(engine: Engine, tensors: Sequence[NamedTensor], version: int) -> None:
    """Loads weights while nothing is in flight."""
    await engine.pause(InFlightPolicy.DRAIN)
    await engine.load_weights(stream(tensors), version=version)
    await engine.resume()


def request(
    prompt: Sequence[int] = (5, 9, 13, 2),
    *,
    logprobs: bool = True,
    name: str = "r",
    priority: int = 0,
    routed_experts_from: int | None = None,
    prompt_logprobs_from: int | None = None,
    constraint: Constraint | None = None,
    sampling_mask: bool = False,
    **sampling: object,
) -> EngineRequest:
    """Returns a greedy request for 16 tokens that ignores end of sequence; arguments override."""
    values = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True} | sampling
    return EngineRequest(
        request_id=name,
        prompt=tuple(prompt),
        sampling=Sampling(**values),  # type: ignore[arg-type]
        logprobs=logprobs,
        priority=priority,
        routed_experts_from=routed_experts_from,
        prompt_logprobs_from=prompt_logprobs_from,
        constraint=constraint,
        sampling_mask=sampling_mask,
    )


async def run(engine: Engine, wanted: EngineRequest) -> Output:
    """Runs one sequence to its end."""
    return await Reader(engine, wanted).output()


async def pause_midway(engine: Engine, wanted: EngineRequest) -> Reader:
    """Starts a sequence and pauses the engine with CONTINUE before the sequence ends.

    An engine in another process may finish the sequence before the pause arrives; then the next
    attempt follows.

    Raises:
        AssertionError: All `TRIES` sequences ended before the pause, or one did not end normally.
    """
    for _ in range(TRIES):
        reader = Reader(engine, wanted)
        await reader.first_tokens()
        await engine.pause(InFlightPolicy.CONTINUE)
        if engine.counters.running:
            assert not reader.done
            return reader
        ended = await reader.output()
        assert ended.reason is FinishReason.LENGTH, f"it was not kept but ended: {ended}"
        await engine.resume()
    raise AssertionError(
        f"{TRIES} sequences of {wanted.sampling.max_tokens} tokens ended before a pause that "
        "came after their first tokens: use longer ones"
    )


async def run_all(engine: Engine, wanted: Iterable[EngineRequest]) -> list[Output]:
    """Runs sequences concurrently and returns their outputs in order."""
    readers = [Reader(engine, one) for one in wanted]
    return [await reader.output() for reader in readers]


def random_prompt(length: int, vocab_size: int, *, seed: int = 0) -> tuple[int, ...]:
    """Returns token ids drawn uniformly from all but the first four ids."""
    return tuple(random.Random(seed).choices(range(4, vocab_size), k=length))


def counters_since(before: EngineCounters, after: EngineCounters) -> EngineCounters:
    """Returns the difference between two readings; `running` is that of the later one."""
    return EngineCounters(
        started=after.started - before.started,
        finished=after.finished - before.finished,
        aborted=after.aborted - before.aborted,
        running=after.running,
    )
