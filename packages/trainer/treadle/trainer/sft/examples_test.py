from pathlib import Path

import pytest

from treadle.agent_loop import Image, Message
from treadle.agent_loop.hf import HfRenderer
from treadle.agent_loop.testing import ByteRenderer
from treadle.trainer import demo
from treadle.trainer.config.sft import SftDataConfig
from treadle.trainer.data import DataError
from treadle.trainer.sft.conversations import PlacedDemonstration
from treadle.trainer.sft.demonstration import Demonstration
from treadle.trainer.sft.examples import ExampleSet, batch_of, make_examples

BYTES = ByteRenderer()
_RENDERER = HfRenderer.from_directory(Path(demo.__file__).parent / "calculator" / "model")


def _conversation(line: int, question: str, answer: str = "A") -> PlacedDemonstration:
    messages = (
        Message(role="system", content="S"),
        Message(role="user", content=question),
        Message(role="assistant", content=answer),
    )
    place = f"rows.jsonl, line {line}"
    return PlacedDemonstration(place=place, demonstration=Demonstration(messages=messages))


_LONG = "What is 1 + 1? " * 20
_ROWS = (_conversation(1, "Q"), _conversation(2, _LONG), _conversation(3, "Q", "1 + 1 " * 40))


def _examples(truncation: str) -> ExampleSet:
    data = SftDataConfig.model_validate(
        {"train_files": ["x"], "max_length": 60, "truncation": truncation}
    )
    return make_examples(_ROWS, data, split="train", renderer=_RENDERER)


def test_a_long_conversation_is_an_error_with_place_length_and_ways_out() -> None:
    with pytest.raises(
        DataError,
        match=r"2 of 3 train conversations are longer than 60 tokens; the first is rows.jsonl, "
        r"line 2 \(\d+ tokens\).* data.truncation=drop, or cut them with data.truncation=right",
    ):
        _examples("error")


def test_long_conversations_are_dropped_and_counted() -> None:
    made = _examples("drop")
    assert len(made.examples) == 1
    assert made.notes[0].startswith("left out: 2 of 3 train conversations are longer")


def test_long_conversations_are_cut_and_those_without_a_loss_token_left_out() -> None:
    made = _examples("right")
    short, cut = made.examples
    assert len(cut[0].ids) == 60
    assert cut[0].loss_mask[-1]
    assert len(short[0].ids) < 60
    assert "2 of 3" in made.notes[0]
    assert made.notes[0].endswith("1 of them have nothing left to learn and are left out")


@pytest.mark.parametrize("length", [14, 15, 16, 17, 18])
def test_a_cut_never_divides_an_image(length: int) -> None:
    first, second = (Image(data=bytes([n]) * 128, mime="image/png") for n in (1, 2))
    messages = (
        Message(role="user", content="<image>Q", images=(first,)),
        Message(role="assistant", content="A"),
        Message(role="user", content="<image>", images=(second,)),
        Message(role="assistant", content="B"),
    )
    conversation = PlacedDemonstration(place="1", demonstration=Demonstration(messages=messages))
    (whole,) = make_examples(
        [conversation], SftDataConfig(train_files=(Path("x"),)), split="train", renderer=BYTES
    ).examples[0]
    begin, end = whole.images[1].start, whole.images[1].stop
    assert [placed.image for placed in whole.images] == [first, second]
    data = SftDataConfig(
        train_files=(Path("x"),), max_length=begin + length - 15, truncation="right"
    )
    ((cut,),) = make_examples([conversation], data, split="train", renderer=BYTES).examples
    inside = begin < data.max_length < end
    assert len(cut.ids) == (begin if inside else data.max_length)
    assert len(cut.images) == 1 + (data.max_length >= end)


def test_none_left_is_an_error() -> None:
    data = SftDataConfig(train_files=(Path("x"),), max_length=60, truncation="drop")
    with pytest.raises(DataError, match="no train conversation is left: left out: 1 of 1"):
        make_examples(_ROWS[1:2], data, split="train", renderer=_RENDERER)


def test_only_sequences_of_one_conversation_share_a_number() -> None:
    (one,) = _examples("drop").examples
    batch = batch_of([one, (one[0], one[0]), one])
    assert [sequence.trajectory for sequence in batch] == [None, 1, 1, None]


def test_what_the_template_refuses_names_the_row() -> None:
    row = _conversation(7, "Q", "one<|im_end|>two")
    data = SftDataConfig(train_files=(Path("x"),))
    with pytest.raises(DataError, match=r"rows.jsonl, line 7: .* which ends a turn"):
        make_examples([row], data, split="train", renderer=_RENDERER)
