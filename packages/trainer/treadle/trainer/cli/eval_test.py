from pathlib import Path

import pytest

from treadle.trainer.main import main
from treadle.trainer.rollout.attached_server import AttachedServer


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AttachedServer, "_CONNECT_S", 0.2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no nothing; it must be a model directory"),
        (["demo:calc"], "there is no demo:calc; it must be"),
        (["demo:math_expression"], "there is no data to evaluate on: give --data FILE"),
        (["demo:calculator", "--data", "no.jsonl"], "no.jsonl does not exist"),
        (["demo:calculator", "--step", "3"], "--step 3: only a run has steps"),
        (
            ["demo:calculator", "--out", "full"],
            "full is not empty: choose another place with --out",
        ),
        (["demo:calculator", "agent.default_loop=x"], "agent.default_loop=x"),
        (["127.0.0.1:1"], "127.0.0.1:1 serves tokens, and prompts are rendered here"),
        (["127.0.0.1:1", "model.path=demo:calculator"], "the rollout server does not answer"),
    ],
)
def test_wrong_input_is_one_message_and_leaves_nothing_behind(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert {path.name for path in Path().rglob("*")} == {"full", "kept"}


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--data=no.jsonl", "--out=full", "reward.name=gsm9k", "rollout.response_length=100000"]
    assert main(["eval", "demo:calculator", *wrong]) == 2
    err = capsys.readouterr().err
    assert "error: 4 problems" in err
    for said in ("no.jsonl does not exist", "full is not empty", "gsm9k", "context of"):
        assert said in err


@pytest.mark.parametrize("option", ["--limit=0", "--samples=many"])
def test_numbers_are_positive(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "demo:calculator", option])
    assert "is not a positive integer" in capsys.readouterr().err
