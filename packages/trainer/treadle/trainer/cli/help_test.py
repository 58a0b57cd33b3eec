import importlib.metadata

import pytest

from treadle.trainer.cli.help import COMMANDS
from treadle.trainer.config.keys import all_leaves
from treadle.trainer.main import _COMMANDS, main


def test_the_front_page_names_every_command_and_section(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert set(COMMANDS) == set(_COMMANDS)
    for name in (*COMMANDS, *{key.partition(".")[0] for key in all_leaves()}):
        assert f"\n  {name} " in page
    assert len(page.splitlines()) < 60


def test_the_keys_of_a_section_or_of_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help", "rollout"]) == 0
    page = capsys.readouterr().out
    assert "rollout.val.temperature  (number, >= 0; default 0.0)" in page
    assert "policy.dtype" not in page
    assert main(["--help", "all"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {key}  (" in page for key in all_leaves())


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--help", "rolout"], "--help rolout: there is no such section; did you mean rollout?"),
        (["--help", "zzz"], "there is no such section; sections: data, model, "),
        (["exprt"], "did you mean `treadle export`?"),
        (["zzz"], "'zzz' is neither a command (train, "),
        (["my.yaml"], "give it as --config my.yaml"),
    ],
)
def test_what_is_not_there_has_a_suggestion(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_the_version_is_that_of_the_installed_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"9.9 of {name}")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "treadle-trainer 9.9 of treadle-trainer\n"
