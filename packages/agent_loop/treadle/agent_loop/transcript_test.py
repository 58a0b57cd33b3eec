"""Tests of the token ledger: examples, and its numbered invariants as properties."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    Completion,
    FinishReason,
    Origin,
    Span,
    TokenChunk,
    Tokens,
    Transcript,
)

token = st.integers(0, 2**32 - 1)
chunk = st.builds(
    lambda pairs, version: TokenChunk(
        token_ids=tuple(p[0] for p in pairs),
        logprobs=tuple(p[1] for p in pairs),
        weight_version=version,
    ),
    st.lists(st.tuples(token, st.floats(-50, 0)), min_size=1, max_size=6),
    st.integers(0, 3),
)
completion = st.lists(chunk, max_size=4).map(
    lambda chunks: Completion(chunks=tuple(chunks), finish=FinishReason.STOP)
)
writes = st.lists(st.one_of(completion, st.lists(token, max_size=6)), max_size=8)


def write(transcript: Transcript, item: Completion | list[int]) -> None:
    if isinstance(item, Completion):
        transcript.sample(item)
    else:
        transcript.observe(item)


def check_invariants(tokens: Tokens) -> None:
    size = len(tokens.ids)
    assert len(tokens.loss_mask) == len(tokens.logprobs) == size  # 1
    assert tokens.spans[0].origin is Origin.PROMPT  # 2
    assert [s.start for s in tokens.spans] == [0, *(s.stop for s in tokens.spans[:-1])]
    assert tokens.spans[-1].stop == size
    assert all(s.start < s.stop for s in tokens.spans)
    for span in tokens.spans:
        sampled = span.origin is Origin.SAMPLED
        assert set(tokens.loss_mask[span.start : span.stop]) == {sampled}  # 3
        assert (span.weight_version is not None) is sampled  # 4
        if not sampled:
            assert set(tokens.logprobs[span.start : span.stop]) == {0.0}
    pairs = pairwise(tokens.spans)
    assert all((a.origin, a.weight_version) != (b.origin, b.weight_version) for a, b in pairs)


@settings(deadline=None)
@given(st.lists(token, min_size=1, max_size=6), writes)
def test_invariants_hold_after_every_write(
    prompt: list[int], items: list[Completion | list[int]]
) -> None:
    transcript = Transcript(prompt)
    states = [transcript.freeze()]
    for item in items:
        write(transcript, item)
        states.append(transcript.freeze())
    for before, after in pairwise(states):
        check_invariants(after)
        size = len(before.ids)
        assert after.ids[:size] == before.ids  # 5
        assert after.loss_mask[:size] == before.loss_mask
        assert after.logprobs[:size] == before.logprobs
    written = [c for i in items if isinstance(i, Completion) for c in i.chunks]
    final = states[-1]
    assert [i for i, m in zip(final.ids, final.loss_mask, strict=True) if m] == [
        t for c in written for t in c.token_ids
    ]
    assert final.ids == transcript.ids
    assert final.num_sampled_tokens == transcript.num_sampled_tokens


@settings(deadline=None)
@given(st.lists(token, min_size=1, max_size=6), writes, st.integers(0, 60))
def test_truncation_is_a_prefix(
    prompt: list[int], items: list[Completion | list[int]], limit: int
) -> None:
    transcript = Transcript(prompt)
    for item in items:
        write(transcript, item)
    whole, cut = transcript.freeze(), transcript.freeze(max_response_tokens=limit)
    size = min(len(whole.ids), len(prompt) + limit)
    assert cut.ids == whole.ids[:size]
    assert cut.loss_mask == whole.loss_mask[:size]
    assert cut.logprobs == whole.logprobs[:size]
    check_invariants(cut)
    assert cut.prompt_ids == tuple(prompt)
    assert cut.response_ids == whole.response_ids[:limit]


def test_weight_versions_are_exact_per_token() -> None:
    transcript = Transcript([1, 2])
    transcript.sample(
        Completion(
            chunks=(
                TokenChunk(token_ids=(3, 4), logprobs=(-1.0, -2.0), weight_version=7),
                TokenChunk(token_ids=(5,), logprobs=(-3.0,), weight_version=8),
            ),
            finish=FinishReason.STOP,
        )
    )
    transcript.observe([6])
    tokens = transcript.freeze()
    assert tokens.spans == (
        Span(origin=Origin.PROMPT, start=0, stop=2),
        Span(origin=Origin.SAMPLED, start=2, stop=4, weight_version=7),
        Span(origin=Origin.SAMPLED, start=4, stop=5, weight_version=8),
        Span(origin=Origin.OBSERVED, start=5, stop=6),
    )
    assert tokens.loss_mask == (False, False, True, True, True, False)
    assert tokens.logprobs == (0.0, 0.0, -1.0, -2.0, -3.0, 0.0)
    assert tokens.weight_versions == (7, 8)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt id"):
        Transcript([])


def test_a_negative_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Transcript([1]).freeze(max_response_tokens=-1)


def test_empty_tokens_have_no_prompt_and_no_version() -> None:
    empty = Tokens.empty()
    assert (empty.num_prompt_tokens, empty.num_sampled_tokens) == (0, 0)
    assert empty.weight_versions is None
