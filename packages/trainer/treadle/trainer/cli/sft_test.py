import json
from pathlib import Path

import pytest

from treadle.trainer.main import main


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for _ in range(5)))
    return file


def _sft(rows: Path, *arguments: str) -> int:
    named = (f"data.train_files={rows}", "model.path=demo:calculator", "data.batch_size=2")
    return main(["sft", *named, f"run.dir={rows.parent / 'never_made'}", *arguments])


def test_a_dry_run_prints_the_plan_and_makes_nothing(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _sft(rows, "--dry-run", "schedule.total_epochs=3") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "training data 5 conversations, 110 tokens, 10 of them under the loss" in out
    assert "steps 6 of 2 conversations (2 an epoch)" in out
    assert not (rows.parent / "never_made").exists()


def test_the_configuration_is_printed_with_its_sources(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _sft(rows, "--print-config", "agent.template_kwargs.x=1", "optim.lr=1e-4") == 0
    out = capsys.readouterr().out
    assert "data.batch_size = 2" in out
    assert "agent.template_kwargs.x = 1" in out
    line = next(line for line in out.splitlines() if line.startswith("policy.optimizer.lr"))
    assert line.split() == ["policy.optimizer.lr", "=", "0.0001", "#", "optim.lr=1e-4"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.bach_size=3", "unknown key data.bach_size; did you mean data.batch_size?"),
        ("rollout.top_p=0.9", "unknown key rollout.top_p"),
        ("data.batch_size=6", "data.batch_size=6 exceeds the 5 training conversations"),
        ("data.truncation=left", "data.truncation=left: must be 'error', 'drop' or 'right'"),
        ("data.max_length=2000", "data.max_length=2000 tokens, and the model in"),
        ("data.max_length=5", "5 of 5 train conversations are longer than 5 tokens"),
        ("schedule.val_every=2", "asks for validation, but data.val_files is empty"),
        ("policy.parallel.tensor=3", "take a size that does"),
        ("model.path=/nowhere", "model.path=/nowhere does not exist"),
        ("agent.parser=nope", "unknown parser; known are"),
    ],
)
def test_a_mistake_is_said_before_anything_starts(
    rows: Path, argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _sft(rows, argument) == 2
    assert message in capsys.readouterr().err
    assert not (rows.parent / "never_made").exists()


def test_what_is_required_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft"]) == 2
    said = capsys.readouterr().err
    assert "data.train_files is required" in said
    assert "model.path is required" in said


def test_the_help_names_sections_and_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--help"]) == 0
    assert "`treadle sft --help SECTION`" in capsys.readouterr().out
    assert main(["sft", "--help", "data"]) == 0
    assert "data.messages_key" in capsys.readouterr().out
    assert main(["sft", "--help", "rollout"]) == 2
    assert "there is no such section" in capsys.readouterr().err
