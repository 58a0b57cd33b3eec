import json
from pathlib import Path

import pytest

from treadle.tracing.viewer.token_text import TokenText

_VOCABULARY = {"Hello": 0, "Ġworld": 1, "Ċ": 2, "ð": 3, "Ł": 4, "ĺ": 5, "Ģ": 6, "▁": 7}
"""Of a byte-level tokenizer: a blank is Ġ, a line feed Ċ, and a smiley has four bytes."""


@pytest.fixture
def vocabulary(tmp_path: Path) -> TokenText:
    path = tmp_path / "tokenizer.json"
    added = [{"id": 9, "content": "<|im_end|>"}]
    path.write_text(json.dumps({"model": {"vocab": _VOCABULARY}, "added_tokens": added}))
    return TokenText(path)


def test_text_is_cut_where_the_tokens_are(vocabulary: TokenText) -> None:
    pieces = vocabulary.pieces([0, 1, 2, 9], "Hello world\n<|im_end|>")
    assert pieces == ["Hello", " world", "\n", "<|im_end|>"]
    assert vocabulary.pieces([], "") == []


def test_a_character_belongs_to_its_last_token(vocabulary: TokenText) -> None:
    assert vocabulary.pieces([0, 3, 4, 5, 6], "Hello\N{GRINNING FACE}") == [
        *("Hello", "", "", ""),
        "\N{GRINNING FACE}",
    ]
    assert vocabulary.pieces([0, 3], "Hello\N{REPLACEMENT CHARACTER}") is not None


def test_what_does_not_make_up_the_text_gives_no_pieces(vocabulary: TokenText) -> None:
    assert vocabulary.pieces([0, 1], "Hello there") is None
    assert vocabulary.pieces([0, 99], "Hello") is None
    assert vocabulary.pieces([7], "▁") is None  # Of no byte.


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model": {"vocab": []}, "added_tokens": []}']
)
def test_a_file_without_a_vocabulary_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json has no vocabulary"):
        TokenText(path)
