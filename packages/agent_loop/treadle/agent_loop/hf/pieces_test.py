"""Tests that the ids of pieces are those of the whole text, and for which tokenizers that is so."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from treadle.agent_loop.hf import pieces
from treadle.agent_loop.hf.pieces import PieceEncoder

TOKENS = ["<|end|>", "<|end|>x", "<think>", "\n\n\n"]


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE with merges across spaces and lines, whose texts are composed."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}+|\s+(?!\S)|\s+|[^\s\p{L}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(
        ["user\n\n", "d\u00e9j\u00e0  end  ", "end>|<", "\n \n"] * 4, trainer
    )
    backend.add_special_tokens(TOKENS)
    return backend


BACKEND = make_tokenizer()
texts = st.lists(
    st.text(max_size=6)
    | st.sampled_from(TOKENS)
    | st.sampled_from(["user\n\n", "de\u0301ja", "d\u00e9j\u00e0", "end", "<|", ">", " ", "\n"])
).map("".join)


def encode(text: str) -> tuple[int, ...]:
    return tuple(BACKEND.encode(text, add_special_tokens=False).ids)


@given(st.lists(texts, min_size=1, max_size=4), st.booleans())
def test_the_ids_are_those_of_the_whole_text(several: list[str], keep: bool) -> None:
    made = PieceEncoder.of(BACKEND)
    assert made is not None
    for text in (*several, *several):
        assert made.encode(text, keep=keep) == encode(text)


@given(texts, texts, texts, st.integers(0, 3))
def test_what_was_written_is_not_tokenised_again(
    first: str, said: str, second: str, cut: int
) -> None:
    """A prompt, what a model wrote byte by byte, and an answer whose first ids are left out."""
    made = PieceEncoder.of(BACKEND)
    assert made is not None
    prompt, answer = encode(first), encode(second)[cut:]
    turn = [i for byte in said.encode() for i in encode(chr(byte))]
    ids = (*prompt, *turn, *answer)
    written = [(0, len(prompt)), (len(prompt) + len(turn), len(ids))]
    known = made.pieces(ids, written)
    for text in (first + said + second, second, said, BACKEND.decode(ids)):
        assert made.encode(text, known=known) == encode(text)


def test_known_pieces_are_whole() -> None:
    made = PieceEncoder.of(BACKEND)
    assert made is not None
    ids = encode("user<think>user<|end|>d\u00e9j\u00e0 end<think>end")
    end = len(ids)
    assert set(made.pieces(ids, [(0, end)])) == {"user", "d\u00e9j\u00e0 end"}
    marks = [place for place, i in enumerate(ids) if BACKEND.id_to_token(i) in TOKENS]
    assert set(made.pieces(ids, [(marks[0] + 1, end)])) == {"d\u00e9j\u00e0 end"}
    assert made.pieces(ids, [(marks[0] + 1, marks[2]), (marks[2], end)]) == {}


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = PieceEncoder.of(BACKEND)
    assert made is not None
    monkeypatch.setattr(pieces, "_MAX_PIECES", 3)
    monkeypatch.setattr(pieces, "_MAX_CHARACTERS", 5)
    for text in ("one", "two<think>three", "four", "longer", "one"):
        assert made.encode(text, keep=True) == encode(text)
    assert list(made._kept) == ["three", "four", "one"]
    made.encode("five")
    assert "five" not in made._kept


def added(**options: bool) -> Callable[[Any], None]:
    def change(backend: Any) -> None:
        backend.add_tokens([AddedToken("<odd>", **options)])

    return change


def setting(name: str, value: object) -> Callable[[Any], None]:
    return lambda backend: setattr(backend, name, value)


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize(
    "change",
    [
        added(lstrip=True, normalized=False),
        added(rstrip=True, normalized=False),
        added(single_word=True, normalized=False),
        added(normalized=True),
        setting("encode_special_tokens", True),
        setting("normalizer", normalizers.Lowercase()),
        setting("normalizer", normalizers.Sequence([normalizers.NFC()])),
        setting("decoder", decoders.Metaspace()),
        setting("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        setting("pre_tokenizer", pre_tokenizers.Metaspace()),
        setting("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), LEVEL])),
        setting(
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), LEVEL]),
        ),
        setting("model", models.BPE(vocab={"a": 0}, merges=[])),
        setting("model", models.WordLevel(vocab={"a": 0}, unk_token="a")),
    ],
)
def test_a_tokenizer_that_may_look_beside_a_piece_is_left_alone(
    change: Callable[[Any], None],
) -> None:
    backend = make_tokenizer()
    assert PieceEncoder.of(backend) is not None
    change(backend)
    assert PieceEncoder.of(backend) is None
