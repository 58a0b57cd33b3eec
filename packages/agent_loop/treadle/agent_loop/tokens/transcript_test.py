"""Tests of the token ledger: examples, and its numbered invariants as properties."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.agent_loop import (
    Completion,
    FinishReason,
    Image,
    Origin,
    PlacedImage,
    Rendering,
    RoutedExperts,
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
PICTURE = Image(data=b"p", mime="image/png")


@st.composite
def renderings(draw: st.DrawFn, *, min_size: int = 0) -> Rendering:
    """Ids with images in some places."""
    ids = draw(st.lists(token, min_size=min_size, max_size=8))
    cuts = sorted(draw(st.sets(st.integers(0, len(ids)), max_size=6)))
    places = [
        PlacedImage(image=PICTURE, start=start, num_tokens=stop - start)
        for start, stop in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    return Rendering(ids=tuple(ids), images=tuple(places))


writes = st.lists(st.one_of(completion, renderings()), max_size=8)


def write(transcript: Transcript, item: Completion | Rendering) -> None:
    if isinstance(item, Completion):
        transcript.sample(item)
    else:
        transcript.observe(item.ids, images=item.images)


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
    end = 0
    for image in tokens.images:  # 5
        assert end <= image.start < image.stop <= size
        assert not any(tokens.loss_mask[image.start : image.stop])
        end = image.stop
    pairs = pairwise(tokens.spans)
    assert all((a.origin, a.weight_version) != (b.origin, b.weight_version) for a, b in pairs)


@settings(deadline=None)
@given(renderings(min_size=1), writes)
def test_invariants_hold_after_every_write(
    prompt: Rendering, items: list[Completion | Rendering]
) -> None:
    transcript = Transcript(prompt.ids, images=prompt.images)
    states = [transcript.freeze()]
    for item in items:
        write(transcript, item)
        states.append(transcript.freeze())
    for before, after in pairwise(states):
        check_invariants(after)
        size = len(before.ids)
        assert after.ids[:size] == before.ids  # 6
        assert after.loss_mask[:size] == before.loss_mask
        assert after.logprobs[:size] == before.logprobs
        assert after.images[: len(before.images)] == before.images
    written = [c for i in items if isinstance(i, Completion) for c in i.chunks]
    final = states[-1]
    assert [i for i, m in zip(final.ids, final.loss_mask, strict=True) if m] == [
        t for c in written for t in c.token_ids
    ]
    assert final.ids == transcript.ids
    assert final.images == transcript.images
    given = [prompt, *(item for item in items if isinstance(item, Rendering))]
    shown = [r.ids[i.start : i.stop] for r in given for i in r.images]
    assert [final.ids[i.start : i.stop] for i in final.images] == shown
    assert final.num_sampled_tokens == transcript.num_sampled_tokens


def experts(first: int, stop: int) -> RoutedExperts:
    """Two layers, one expert each, of which the first is the row's own number."""
    data = b"".join(bytes((row % 256, 7)) for row in range(first, stop))
    return RoutedExperts(first=first, num_layers=2, top_k=1, id_bytes=1, data=data)


@settings(deadline=None)
@given(renderings(min_size=1), writes, st.integers(0, 40), st.data())
def test_experts_stay_with_their_rows(
    prompt: Rendering, items: list[Completion | Rendering], limit: int, data: st.DataObject
) -> None:
    """Through turns, tool results, completions without tokens and truncation; 6."""
    transcript = Transcript(prompt.ids, images=prompt.images)
    for item in items:
        known = transcript.num_routed_rows
        assert known <= len(transcript)
        if isinstance(item, Completion):
            last = len(transcript) + item.num_tokens
            # All but the last token's, and that one's if a stop string cut the completion.
            stop = last if not item.num_tokens else last - data.draw(st.integers(0, 1))
            item = replace(item, routed_experts=experts(known, max(known, stop)))
        write(transcript, item)
    frozen = transcript.freeze(max_response_tokens=limit)
    rows = transcript.num_routed_rows
    if any(isinstance(item, Completion) for item in items):
        assert frozen.routed_experts == experts(0, min(rows, len(frozen.ids)))
        sampled = [i for i, masked in enumerate(frozen.loss_mask) if masked]
        assert not sampled or max(sampled) <= rows  # the row before it predicts it
    else:
        assert frozen.routed_experts is None


def test_sampling_masks_stay_with_their_tokens() -> None:
    def completion(*masks: bytes) -> Completion:
        chunk = TokenChunk(
            token_ids=(4, 5), logprobs=(-1.0, -1.0), weight_version=0, sampling_masks=masks
        )
        return Completion(chunks=(chunk,), finish=FinishReason.STOP)

    transcript = Transcript([1, 2])
    transcript.sample(completion())
    assert transcript.freeze().sampling_masks == ()
    transcript.observe([3])
    transcript.sample(completion(b"", b"\x07"))
    transcript.observe([3])
    whole = b"\x00"
    frozen = transcript.freeze()
    assert frozen.sampling_masks == (*[whole] * 5, b"", b"\x07", whole)
    assert transcript.freeze(max_response_tokens=4).sampling_masks == (*[whole] * 5, b"")
    with pytest.raises(ValueError, match="2 tokens has 1 sampling masks"):
        completion(b"")


def test_experts_that_leave_a_gap_are_refused() -> None:
    transcript = Transcript([1, 2, 3])
    chunk = TokenChunk(token_ids=(4,), logprobs=(-1.0,), weight_version=0)
    late = Completion(chunks=(chunk,), finish=FinishReason.STOP, routed_experts=experts(1, 3))
    with pytest.raises(ValueError, match="from row 1 on; those of 0 rows are known"):
        transcript.sample(late)
    assert len(transcript) == 3


@settings(deadline=None)
@given(renderings(min_size=1), writes, st.integers(0, 60))
def test_truncation_is_a_prefix_that_cuts_no_image(
    prompt: Rendering, items: list[Completion | Rendering], limit: int
) -> None:
    transcript = Transcript(prompt.ids, images=prompt.images)
    for item in items:
        write(transcript, item)
    whole, cut = transcript.freeze(), transcript.freeze(max_response_tokens=limit)
    size = min(len(whole.ids), len(prompt.ids) + limit)
    size = next((i.start for i in whole.images if i.start < size < i.stop), size)
    assert cut.ids == whole.ids[:size]
    assert cut.loss_mask == whole.loss_mask[:size]
    assert cut.logprobs == whole.logprobs[:size]
    check_invariants(cut)
    assert cut.images == tuple(i for i in whole.images if i.stop <= size)
    assert cut.prompt_ids == prompt.ids


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


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 3), (1, 2), (2, 1)])
def test_an_image_outside_its_ids_is_refused(start: int, num_tokens: int) -> None:
    image = PlacedImage(image=PICTURE, start=start, num_tokens=num_tokens)
    with pytest.raises(
        ValueError, match=rf"an image is at \[{start}, 3\); it must lie in \[0, 2\)"
    ):
        Transcript([1, 2], images=[image])
    transcript = Transcript([1, 2, 3])
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\)"):
        transcript.observe([1, 2], images=[image])
    assert transcript.ids == (1, 2, 3)
    assert not transcript.images


def test_images_that_overlap_are_refused() -> None:
    images = [PlacedImage(image=PICTURE, start=start, num_tokens=2) for start in (0, 1)]
    with pytest.raises(ValueError, match=r"must lie in \[2, 3\), after the image before it"):
        Transcript([1, 2, 3], images=images)
    with pytest.raises(ValueError, match="an image has 0 ids at position 1"):
        PlacedImage(image=PICTURE, start=1, num_tokens=0)


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
