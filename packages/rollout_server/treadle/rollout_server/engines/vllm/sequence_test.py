import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import (
    EngineCounters,
    EngineEvent,
    EngineRequest,
    Finished,
    FinishReason,
    PromptLogprobs,
    Sampling,
    Started,
    Tokens,
)
from treadle.rollout_server.engines.vllm.sequence import Sequence, SequenceStats

REQUEST = EngineRequest(request_id="r", prompt=(1,), sampling=Sampling(max_tokens=9), logprobs=True)


def output(
    *token_ids: int,
    reason: str | None = None,
    cached: int = 0,
    prompt_logprobs: list[float] | None = None,
    masks: list[list[int]] | None = None,
) -> Any:
    """What vLLM puts into a collector."""
    prompt = None if prompt_logprobs is None else SimpleNamespace(logprobs=prompt_logprobs)
    completion = SimpleNamespace(
        token_ids=list(token_ids),
        logprobs=SimpleNamespace(logprobs=[-float(token_id) for token_id in token_ids]),
        finish_reason=reason,
        sampling_mask=None if masks is None else SimpleNamespace(token_ids=masks),
    )
    return SimpleNamespace(
        outputs=[completion],
        finished=reason is not None,
        num_cached_tokens=cached,
        prompt_logprobs=prompt,
    )


class State:
    """The labels that vLLM keeps of a sequence."""

    def __init__(self, *starts: tuple[str, int]) -> None:
        self.weight_version_starts = list(starts) or [("0", 0)]
        self.routed_experts_chunks: list[Any] = []


def submitted(stats: SequenceStats, *starts: tuple[str, int]) -> Sequence:
    sequence = Sequence(REQUEST, stats)
    sequence.submitted(State(*starts))
    return sequence


async def events_of(sequence: Sequence) -> list[EngineEvent]:
    return [event async for event in sequence.events()]


@pytest.mark.asyncio
async def test_outputs_become_events() -> None:
    stats = SequenceStats()
    sequence = submitted(stats)
    sequence.put(output(5, cached=16))
    sequence.put(output(6, 7, reason="stop"))
    assert await events_of(sequence) == [
        Started(16),
        Tokens((5,), (-5.0,), 0),
        Tokens((6, 7), (-6.0, -7.0), 0),
        Finished(FinishReason.STOP),
    ]
    assert stats.counters == EngineCounters(started=1, finished=1)


@pytest.mark.asyncio
@pytest.mark.parametrize(("first", "wanted"), [(1, (-1.0, -2.0, -3.0)), (3, (-3.0,)), (4, ())])
async def test_logprobs_of_the_prompt_come_before_the_first_token(
    first: int, wanted: tuple[float, ...]
) -> None:
    request = replace(REQUEST, prompt=(1, 2, 3, 4), prompt_logprobs_from=first)
    sequence = Sequence(request, SequenceStats())
    sequence.submitted(State(("7", 0)))
    sequence.put(output(5, reason="stop", prompt_logprobs=[-1.0, -2.0, -3.0]))
    assert await events_of(sequence) == [
        Started(0),
        *([PromptLogprobs(wanted, 7)] if wanted else []),
        Tokens((5,), (-5.0,), 7),
        Finished(FinishReason.STOP),
    ]


@pytest.mark.asyncio
async def test_logprobs_of_the_prompt_that_are_not_finite_end_the_sequence() -> None:
    request = replace(REQUEST, prompt=(1, 2), prompt_logprobs_from=1)
    sequence = Sequence(request, SequenceStats())
    sequence.submitted(State())
    sequence.put(output(5, reason="stop", prompt_logprobs=[math.nan]))
    with pytest.raises(FloatingPointError, match="not finite"):
        await events_of(sequence)


@pytest.mark.asyncio
async def test_a_late_reader_gets_each_token_with_its_own_version() -> None:
    """As when outputs were merged while nobody read."""
    sequence = submitted(SequenceStats(), ("4", 0), ("5", 2), ("7", 3))
    sequence.put(output(1, 2, 3, 4, 5))
    sequence.put(output(6, reason="length"))
    tokens = [event for event in await events_of(sequence) if isinstance(event, Tokens)]
    assert [(event.token_ids, event.weight_version) for event in tokens] == [
        ((1, 2), 4),
        ((3,), 5),
        ((4, 5), 7),
        ((6,), 7),
    ]


@pytest.mark.asyncio
async def test_masks_come_with_their_tokens_and_experts_of_all_new_rows_with_the_last() -> None:
    sequence = Sequence(replace(REQUEST, sampling_mask=True), SequenceStats())
    state = State(("4", 0), ("5", 1))
    sequence.submitted(state)
    state.routed_experts_chunks += [np.array([[[1, 2]]], np.uint8), np.array([[[3, 4]]], np.uint8)]
    sequence.put(output(5, 6, masks=[[7, 8], []]))
    state.routed_experts_chunks.append(np.array([[[5, 6]]], np.uint8))
    sequence.put(output(7, reason="length", masks=[[9]]))
    tokens = [event for event in await events_of(sequence) if isinstance(event, Tokens)]
    assert [event.sampling_masks for event in tokens] == [(b"\7\x08",), (b"",), (b"\x09",)]
    assert [event.routed_experts for event in tokens] == [b"", b"\1\2\3\4", b"\5\6"]


@pytest.mark.asyncio
async def test_it_runs_until_vllm_says_that_it_ended_whether_or_not_it_is_read() -> None:
    stats = SequenceStats()
    sequence = submitted(stats)
    sequence.put(output(5))
    assert stats.counters.running == 1
    sequence.put(output(reason="abort"))
    await stats.running.wait_zero()
    assert (await events_of(sequence))[-1] == Finished(FinishReason.INTERRUPTED)


@pytest.mark.asyncio
async def test_what_sampled_nothing_is_withdrawn_and_comes_again() -> None:
    stats = SequenceStats()
    sequence = submitted(stats)
    sequence.put(output(reason="abort"))
    assert await events_of(sequence) == []
    assert stats.counters == EngineCounters()
    sequence.submitted(State())
    sequence.put(output(5, reason="length"))
    assert (await events_of(sequence))[0] == Started(0)


@pytest.mark.asyncio
async def test_closing_ends_a_sequence_that_vllm_never_started() -> None:
    sequence = submitted(SequenceStats())
    sequence.interrupt()
    assert await events_of(sequence) == [Started(0), Finished(FinishReason.INTERRUPTED)]


@pytest.mark.asyncio
async def test_a_failure_reaches_the_reader() -> None:
    stats = SequenceStats()
    sequence = submitted(stats)
    sequence.put(output(5))
    sequence.fail(RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        await events_of(sequence)
    assert stats.counters == EngineCounters(started=1, aborted=1)


@pytest.mark.asyncio
async def test_broken_logits_end_a_sequence_as_a_failure() -> None:
    sequence = submitted(SequenceStats())
    sequence.put(output(5))
    broken = output(6, reason="stop")
    broken.outputs[0].logprobs.logprobs = [math.nan]
    sequence.put(broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        await events_of(sequence)


@given(st.lists(st.sampled_from(["token", "stop", "abort", "fail", "interrupt", "leave"])))
def test_the_counters_always_add_up(steps: list[str]) -> None:
    async def run() -> None:
        stats = SequenceStats()
        sequence = submitted(stats)
        for step in steps:
            match step:
                case "token":
                    sequence.put(output(5))
                case "stop":
                    sequence.put(output(5, reason="stop"))
                case "abort":
                    sequence.put(output(reason="abort"))
                    if not sequence.ended:
                        sequence.submitted(State())
                case "fail":
                    sequence.fail(RuntimeError())
                case "interrupt":
                    sequence.interrupt()
                case "leave":
                    sequence.abort()
            counters = stats.counters
            assert counters.started == counters.finished + counters.aborted + counters.running
            assert counters.started == sequence.started
            assert counters.running == (sequence.started and not sequence.ended)

    asyncio.run(run())
