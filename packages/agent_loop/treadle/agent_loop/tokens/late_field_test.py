"""Tokens whose spans are numbers until somebody reads them; trajectories are in the trainer's."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

import pytest

from treadle.agent_loop.tokens.arrays import FloatArray, IntArray
from treadle.agent_loop.tokens.transcript import Origin, Span, SpanTable, Tokens

PROMPT = Span(origin=Origin.PROMPT, start=0, stop=2)
SAMPLED = Span(origin=Origin.SAMPLED, start=2, stop=3, weight_version=0)
WHOLE = Tokens(ids=(1, 2, 3), logprobs=(0.0, 0.0, -0.5), spans=(PROMPT, SAMPLED))


def late(table: SpanTable) -> Tokens:
    """Returns `WHOLE` with these spans."""
    return Tokens.of_source(
        table,
        ids=IntArray(WHOLE.ids),
        logprobs=FloatArray(WHOLE.logprobs),
        images=(),
        routed_experts=None,
        sampling_masks=(),
    )


def test_nothing_but_the_spans_themselves_makes_them() -> None:
    tokens = late(SpanTable(IntArray((0, 1, 0, 2, 2, 3, 0, 1))))
    table = tokens.source
    assert table is not None and tokens.span_table is table
    assert (tokens.num_prompt_tokens, tokens.num_sampled_tokens) == (2, 1)
    assert tokens.loss_mask == (False, False, True)
    assert tokens.weight_versions == (0, 0)
    assert list(tokens.runs()) == list(WHOLE.runs())
    assert not table.is_made
    assert copy.deepcopy(tokens) == WHOLE
    assert tokens == WHOLE and hash(tokens) == hash(WHOLE)
    assert table.is_made


@pytest.mark.parametrize(
    ("logprobs", "num_bytes"), [((0.0, 0.0, -0.5), 4), ((0.0, -1.0, -0.5), 12), ((-0.0,) * 3, 12)]
)
def test_log_probabilities_of_tokens_that_nobody_sampled_take_no_memory_if_they_are_0(
    logprobs: tuple[float, ...], num_bytes: int
) -> None:
    table = SpanTable.of(WHOLE.spans)
    assert table is not None
    packed = table.pack_logprobs(FloatArray(logprobs))
    assert memoryview(packed).nbytes == num_bytes

    def made() -> FloatArray:
        return table.unpack_logprobs(bytes(packed))

    assert made().data.tobytes() == FloatArray(logprobs).data.tobytes()
    assert len(made()) == 3
    assert made()[1:] == logprobs[1:]
    assert FloatArray(made()) == FloatArray.of(made()) == logprobs
    assert copy.deepcopy(made()) == logprobs
    read = made()
    assert (read[2], read[-2], len(read)) == (logprobs[2], logprobs[1], 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Span):
    pass


@pytest.mark.parametrize(
    "odd",
    [
        Own(origin=Origin.SAMPLED, start=2, stop=3, weight_version=0),
        replace(SAMPLED, origin=cast(Origin, "sampled")),
        replace(SAMPLED, weight_version=-1),
        replace(SAMPLED, weight_version=2**32 - 1),
        replace(SAMPLED, start=-1),
        replace(SAMPLED, start=True),
        replace(SAMPLED, weight_version=cast(int, 0.5)),
    ],
)
def test_what_numbers_cannot_say_is_no_table(odd: Span) -> None:
    assert SpanTable.of((PROMPT, odd)) is None


def test_threads_that_read_at_once_get_the_same_spans() -> None:
    begin = threading.Barrier(4)

    class Slow(SpanTable):
        __slots__ = ()

        def make(self) -> tuple[Span, ...]:
            made = super().make()
            begin.wait(timeout=60)  # until all threads make their own
            return made

    tokens = late(Slow(IntArray((0, 1, 0, 2, 2, 3, 0, 1))))
    with ThreadPoolExecutor(4) as threads:
        found = [each.result() for each in [threads.submit(lambda: tokens.spans) for _ in "abcd"]]
    assert {id(spans) for spans in found} == {id(tokens.spans)}
    assert found[0] == WHOLE.spans
