import runpy
from pathlib import Path

import pytest

from treadle.trainer.cli.new import TEMPLATE
from treadle.trainer.main import main


def test_a_task_is_written_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "shop/my-prices"]) == 0
    out = capsys.readouterr().out
    assert "cd shop/my-prices && treadle --config config.yaml" in out
    written = tmp_path / "shop" / "my-prices"
    assert {file.name for file in written.iterdir()} == {
        *("README.md", "config.yaml", "make_rows.py", "reward.py", "tools.py", "tools.yaml"),
        *("train.jsonl", "val.jsonl"),
    }
    assert "my_task" not in "".join(file.read_text() for file in written.iterdir())
    assert "name: my-prices" in (written / "config.yaml").read_text()
    assert '"data_source": "my-prices"' in (written / "train.jsonl").read_text()


def test_the_rows_are_those_that_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(TEMPLATE / "make_rows.py"), run_name="__main__")
    for name in ("train.jsonl", "val.jsonl"):
        assert (tmp_path / name).read_bytes() == (TEMPLATE / name).read_bytes()


def test_an_empty_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["new", "."]) == 0
    assert "name: here" in (tmp_path / "here" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("full", "full is not empty: choose another name, or empty it"),
        ("a_file", "a_file is a file: choose another name"),
        ("my task", "'my task' cannot be the name of a task: begin with a letter"),
        ("7b", "'7b' cannot be the name of a task"),
        ("x" * 65, "at most 64 letters"),
    ],
)
def test_a_place_or_name_that_cannot_be_is_refused(
    name: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    (tmp_path / "a_file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    assert main(["new", name]) == 2
    assert message in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "right", "answered"),
    [("10\n#### 10", 1.0, 1.0), ("#### 9\n#### 10", 1.0, 1.0), ("#### 11", 0.0, 1.0), ("", 0, 0)],
)
def test_the_reward_of_the_template(text: str, right: float, answered: float) -> None:
    score = runpy.run_path(str(TEMPLATE / "reward.py"))["score"]
    assert score("my_task", text, "10") == {"score": right, "answered": answered}


def test_the_tool_of_the_template() -> None:
    calculator = runpy.run_path(str(TEMPLATE / "tools.py"))["calculator"]
    assert [calculator(text) for text in ("12*7", "12 + 7", "7-12")] == ["84", "19", "-5"]
    with pytest.raises(Exception, match="write two whole numbers"):
        calculator("2**9")
