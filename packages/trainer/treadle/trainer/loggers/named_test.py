import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.loggers.generations import generations
from treadle.trainer.main import main
from treadle.trainer.report.testing import make_trajectory


@pytest.mark.parametrize(
    ("given", "loggers"),
    [
        ("run.loggers=wandb", ("wandb",)),
        ("trainer.logger=tensorboard", ("tensorboard",)),
        ("trainer.logger=['console','wandb','file']", ("console", "wandb", "jsonl")),
    ],
)
def test_one_name_or_a_list_in_our_words_and_in_those_of_verl(
    given: str, loggers: tuple[str, ...]
) -> None:
    assert load_config([DEMO], [given]).config.run.loggers == loggers


def test_a_file_of_your_own_is_named_from_where_the_argument_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config([DEMO], ["run.loggers=[mine.py:Mine]"]).config
    assert config.run.loggers == (f"{tmp_path}/mine.py:Mine",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("run.loggers=[swanlab]", "unknown logger 'swanlab'; known are console, jsonl, mlflow"),
        ("trainer.logger=swanlab", "unknown logger 'swanlab'"),
        ("run.loggers=[wandb,wandb]", "names wandb twice"),
        ("run.loggers=[a.py:Mine,b.py:Mine]", r"a\.py:Mine and .*b\.py:Mine would share their log"),
        ("run.loggers=[wandb,mine.py:wandb]", r"wandb and .*mine\.py:wandb would share their log"),
    ],
)
def test_a_name_that_is_not_known_or_not_its_own_is_an_error_that_says_so(
    given: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([DEMO], [given])


def test_a_start_says_at_once_which_loggers_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent, find_spec = ("wandb", "tensorboardX"), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in absent else find_spec(name, *rest),
    )
    (tmp_path / "mine.py").write_text("class Half:\n    def metrics(self, step, values): ...\n")
    run_dir = tmp_path / "run"
    loggers = f"run.loggers=[wandb,tensorboard,mlflow,{tmp_path}/mine.py:Half,absent.py:X]"
    assert main([loggers, f"run.dir={run_dir}"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "4 problems" in said
    assert 'wandb is not installed: pip install "treadle-trainer[wandb]"' in said
    assert 'tensorboardX is not installed: pip install "treadle-trainer[tensorboard]"' in said
    assert "mine.py:Half' lacks table, finish" in said
    assert "absent.py does not exist" in said
    assert not run_dir.exists()


def test_the_table_of_a_validation_says_what_was_asked_answered_and_scored() -> None:
    table = generations([replace(make_trajectory(), answer="42")], limit=1)
    (row,) = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert row["reward"] == row["accuracy"] == 1.0
    assert (row["data_source"], row["ground_truth"]) == ("treadle/calculator", "42")
    assert row["prompt"] == "user: What is 6 * 7?"
    assert row["answer"] == (
        "assistant: calculator({'expression': '6*7'})\n\ntool: 42\n\nassistant: #### 42"
    )
    assert row["extracted"] == "42"
    assert row["stop"] == "finished"
