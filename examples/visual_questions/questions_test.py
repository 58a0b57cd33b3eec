import io
import random
from pathlib import Path

import pytest
from PIL import Image

from treadle.agent_loop.hf import HfRenderer
from treadle.trainer.config.load import load_config
from treadle.trainer.data import read_rows
from treadle.trainer.data.images import row_messages
from visual_questions.make_model import make_model
from visual_questions.preprocess import main
from visual_questions.reward import score
from visual_questions.shapes import ANSWERS, SIDE, draw

HERE = Path(__file__).parent


def test_drawings_follow_from_their_seed_and_show_what_is_asked() -> None:
    rng = random.Random(3)
    drawn = [draw(rng) for _ in range(200)]
    again = random.Random(3)
    assert drawn == [draw(again) for _ in range(200)]
    for question in drawn:
        assert question.answer in ANSWERS[question.text]
        image = Image.open(io.BytesIO(question.png))
        assert image.size == (SIDE, SIDE)
        assert len(image.getcolors() or ()) == 2, "the ground and one colour"
    assert {question.answer for question in drawn} == {
        answer for answers in ANSWERS.values() for answer in answers
    }


def test_the_rows_are_read_with_their_images_and_repeat(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(["--output", str(tmp_path / name), "--train", "3", "--test", "2"]) == 0
    rows = read_rows([tmp_path / "a" / "train.parquet", tmp_path / "a" / "test.parquet"])
    assert [row.columns for row in rows] == [
        row.columns
        for row in read_rows([tmp_path / "b" / "train.parquet", tmp_path / "b" / "test.parquet"])
    ]
    (message,) = row_messages(rows[0])
    assert len(message.images) == 1 and message.content.startswith("<image>")


def test_only_the_exact_answer_scores() -> None:
    right, wrong = {"score": 1.0}, {"score": 0.0}
    assert score("drawn", "red", "red") == score("drawn", " Red\n", "red") == right
    for answer in ("red!", "blue", ""):
        assert score("drawn", answer, "red") == wrong


@pytest.mark.parametrize("name", ["config.yaml", "tiny.yaml"])
def test_the_configurations_are_valid(name: str) -> None:
    config = load_config([HERE / name], []).config
    assert config.data.train_files == (HERE / "data" / "train.parquet",)
    (reward,) = config.reward.names
    assert reward.endswith("reward.py:score")


def test_the_model_is_made_twice_the_same_and_its_prompt_shows_nine_ids(tmp_path: Path) -> None:
    losses = [make_model(tmp_path / name, steps=2) for name in ("a", "b")]
    assert losses[0] == losses[1]
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert main(["--output", str(tmp_path), "--train", "1", "--test", "1"]) == 0
    row = read_rows([tmp_path / "train.parquet"])[0]
    renderer = HfRenderer.from_directory(tmp_path / "a")
    rendered = renderer.render(row_messages(row), tools=())
    assert [placed.num_tokens for placed in rendered.images] == [9]
    with pytest.raises(FileExistsError):
        make_model(tmp_path / "a", steps=0)
