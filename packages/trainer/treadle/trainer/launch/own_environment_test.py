import sys
from pathlib import Path

import pytest

from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.launch.own_environment import ask_command, check_command


def test_a_program_that_is_nowhere_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"^a\.key=\['/nowhere/p', '-v'\]: there is no program"):
        check_command("a.key", ("/nowhere/p", "-v"))
    check_command("a.key", (sys.executable,))


def test_a_command_is_asked_outside_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = "import os, sys; print(os.environ.get('PYTHONPATH'), sys.argv[1])"
    assert ask_command("a.key", (sys.executable, "-c", code), "--version") == "None --version\n"
    with pytest.raises(ConfigError, match=r"a\.key: `.*` exited with status 1:\nnothing here"):
        ask_command("a.key", (sys.executable, "-c", "exit('nothing here')"), "--version")
    with pytest.raises(ConfigError, match=r"a\.key: `.*` does not run: .*No such file"):
        ask_command("a.key", (str(tmp_path / "none"),), "--version")
