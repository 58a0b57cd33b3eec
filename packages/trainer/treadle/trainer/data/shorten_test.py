from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import Message
from treadle.agent_loop.testing import ByteRenderer
from treadle.trainer.data.shorten import Side, shorten

RENDERER = ByteRenderer()


def _count(messages: Sequence[Message]) -> int:
    return len(RENDERER.render(messages, tools=()).ids)


def _prompt(*contents: str) -> list[Message]:
    return [Message(role="user", content=content) for content in contents]


def test_each_side_cuts_its_part() -> None:
    prompt = _prompt("ab", "0123456789")
    limit = _count(prompt) - 5
    texts = {}
    for side in ("left", "right", "middle"):
        found = shorten(prompt, side, limit=limit, count=_count)
        assert found is not None
        (first, second), num_tokens = found
        assert (first.content, num_tokens) == ("ab", limit)
        texts[side] = second.content
    assert texts == {"left": "56789", "right": "01234", "middle": "01289"}


@given(
    st.lists(st.text(max_size=20), min_size=1, max_size=3),
    st.integers(0, 80),
    st.sampled_from(["left", "right", "middle"]),
)
def test_what_is_left_fits_and_one_character_more_does_not(
    contents: list[str], limit: int, side: Side
) -> None:
    prompt = _prompt(*contents)
    if _count(prompt) <= limit:
        return
    found = shorten(prompt, side, limit=limit, count=_count)
    longest = max(range(len(contents)), key=lambda index: len(contents[index]))
    empty = [m if i != longest else Message(role="user", content="") for i, m in enumerate(prompt)]
    if found is None:
        # At most three bytes of one character are missing.
        assert _count(empty) > limit - 4
        return
    messages, num_tokens = found
    assert _count(messages) == num_tokens <= limit
    kept = messages[longest].content
    assert 0 < len(kept) < len(contents[longest])
    assert [m.content for i, m in enumerate(messages) if i != longest] == [
        text for i, text in enumerate(contents) if i != longest
    ]
