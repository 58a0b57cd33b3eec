"""Completions cut at stop strings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import Completion, FinishReason, TokenChunk, ToolSpec
from treadle.agent_loop.capture.stop_strings import cut_at_stop
from treadle.agent_loop.testing import ByteRenderer

RENDERER = ByteRenderer()


def completion(text: str, *sizes: int) -> Completion:
    """A completion in chunks of these sizes, each of its own weight version, and a last one."""
    ids = RENDERER.encode(text)
    chunks, start = [], 0
    for version, size in enumerate((*sizes, len(ids) - sum(sizes))):
        part = ids[start : start + size]
        start += size
        if part:
            logprobs = tuple(-float(t) for t in part)
            chunks.append(TokenChunk(token_ids=part, logprobs=logprobs, weight_version=version))
    return Completion(chunks=tuple(chunks), finish=FinishReason.LENGTH)


def test_1_the_tokens_of_the_stop_string_stay_and_its_text_goes() -> None:
    cut = cut_at_stop(completion("do it STOP and more", 4, 4), ["STOP"], RENDERER)
    assert RENDERER.decode(cut.completion.token_ids) == "do it STOP"
    assert cut.parsed.message.content == "do it "
    assert cut.uncut == "do it STOP"
    assert cut.completion.finish is FinishReason.STOP
    assert [chunk.weight_version for chunk in cut.completion.chunks] == [0, 1, 2]


def test_2_without_a_stop_string_in_it_a_completion_stays_as_it_is() -> None:
    whole = completion("do it")
    for stop in ((), ("STOP",)):
        cut = cut_at_stop(whole, stop, RENDERER)
        assert cut.completion is whole
        assert cut.uncut is None


def test_3_the_first_to_be_complete_counts() -> None:
    cut = cut_at_stop(completion("a bc d"), ["bc d", "c"], RENDERER)
    assert RENDERER.decode(cut.completion.token_ids) == "a bc"
    assert cut.parsed.message.content == "a b"


def test_4_one_within_a_call_ends_the_completion_and_leaves_the_text() -> None:
    text = 'Hm. <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call> tail'
    tools = [ToolSpec(name="f", description="F.")]
    cut = cut_at_stop(completion(text), ["</tool_call>"], RENDERER, tools=tools)
    assert cut.parsed.message.content == "Hm."
    assert [call.name for call in cut.parsed.message.tool_calls] == ["f"]
    assert cut.uncut is None
    assert RENDERER.decode(cut.completion.token_ids).endswith("</tool_call>")


@given(
    st.text("abä", min_size=1, max_size=20),
    st.lists(st.text("abä", min_size=1, max_size=3), max_size=3),
    st.integers(0, 5),
)
def test_5_what_is_kept_is_the_shortest_beginning_that_holds_a_stop_string(
    text: str, stop: list[str], first: int
) -> None:
    whole = completion(text, min(first, len(text.encode())))
    kept = cut_at_stop(whole, stop, RENDERER).completion.token_ids
    assert kept == whole.token_ids[: len(kept)]
    said = RENDERER.decode(kept)
    if kept != whole.token_ids:
        assert any(said.endswith(word) for word in stop)
    assert not any(word in RENDERER.decode(kept[:-1]) for word in stop)
    if not any(word in text for word in stop):
        assert kept == whole.token_ids


def test_6_a_character_in_the_middle_does_not_count_before_its_last_byte() -> None:
    cut = cut_at_stop(completion("xäy"), ["ä"], RENDERER)
    assert cut.completion.num_tokens == 3
    assert cut.parsed.message.content == "x"


@pytest.mark.parametrize("stop", [["<end>"], ["b<end>"]])
def test_7_marks_of_the_template_may_be_stop_strings(stop: list[str]) -> None:
    ids = (*RENDERER.encode("ab"), *RENDERER.stop_token_ids)
    chunk = TokenChunk(token_ids=ids, logprobs=(0.0,) * 3, weight_version=0)
    whole = Completion(chunks=(chunk,), finish=FinishReason.STOP)
    cut = cut_at_stop(whole, stop, RENDERER)
    assert cut.completion is whole
    assert cut.parsed.message.content == "ab"


def test_8_one_that_the_last_token_completes_is_why_the_completion_ended() -> None:
    cut = cut_at_stop(completion("do STOP"), ["STOP"], RENDERER)  # its length was used up, too
    assert cut.completion.finish is FinishReason.STOP
    assert cut.completion.token_ids == completion("do STOP").token_ids


def test_9_what_would_be_a_call_is_text_where_no_tool_was_offered() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    cut = cut_at_stop(completion(f"Hm. {call} STOP and more"), ["STOP"], RENDERER)
    assert cut.parsed.message.content == f"Hm. {call} "
    assert cut.parsed.requests == ()
    assert cut.uncut == f"Hm. {call} STOP"
