import sys
from pathlib import Path

import pytest

from treadle.rollout_server.testing.engine_command import engine_command


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TREADLE_VLLM_SERVER", raising=False)


def test_fake_and_torch_run_here() -> None:
    assert engine_command("fake") == engine_command("torch")
    assert engine_command("fake")[0] == sys.executable


def test_a_pex_beside_the_test_wins_over_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_VLLM_SERVER", "'/opt/my engine/python' -m server")
    assert engine_command("vllm") == ("/opt/my engine/python", "-m", "server")
    pex = tmp_path / "packages.rollout_server" / "vllm.pex"
    pex.parent.mkdir()
    pex.touch()
    assert engine_command("vllm") == (sys.executable, str(pex))
    assert engine_command("vllm_stock") == engine_command("vllm")


def test_without_an_environment_the_test_is_skipped_and_says_what_to_set() -> None:
    with pytest.raises(pytest.skip.Exception, match="set TREADLE_VLLM_SERVER"):
        engine_command("vllm")
