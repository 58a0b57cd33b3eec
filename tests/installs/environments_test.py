"""Environments of other libraries, installed as they come, played by Treadle's loops."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from installs.foreign import PROJECTS, ROOT, environment, make_venv, run

pytestmark = pytest.mark.timeout(900)

PROGRAM = Path(__file__).with_name("environment_programs.py")
EXAMPLES = ROOT / "examples" / "environments"


def _python(programs: Path, folder: Path, lock: str) -> Path:
    bin_folder = make_venv(folder / "venv", programs)
    path = ROOT / "3rdparty" / "python" / lock
    run(
        [programs / "uv", "pip", "install", "-q", "--python", bin_folder / "python", "-r", path],
        cwd=folder,
        env=environment(programs),
    )
    return bin_folder / "python"


@pytest.fixture(scope="module")
def games(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with TextArena, Gymnasium and OpenEnv."""
    return _python(programs, tmp_path_factory.mktemp("games"), "environments.lock.txt")


@pytest.fixture(scope="module")
def verifiers(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with verifiers."""
    return _python(programs, tmp_path_factory.mktemp("verifiers"), "verifiers.lock.txt")


def _play(python: Path, folder: Path, text: str, *replies: str) -> dict[str, Any]:
    file = folder / "environment.yaml"
    file.write_text(text)
    sources = [str(ROOT / project) for project in PROJECTS]
    path = os.pathsep.join([*sources, str(EXAMPLES)])
    told = environment(python.parent) | {"PYTHONPATH": path}
    said = run([python, PROGRAM, file, *replies], cwd=folder, env=told)
    found: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert found["error"] is None
    return found


def test_a_game_of_textarena_alone(games: Path, tmp_path: Path) -> None:
    guesses = [f"[{number}]" for number in range(1, 21)]
    played = _play(games, tmp_path, "textarena: GuessTheNumber-v0\nrows: 1\n", *guesses)
    assert played["stop"] == "finished"
    assert 0 < played["reward"] <= 1
    assert "higher" in played["heard"][1]
    assert "Guess The Number" not in played["heard"][1]  # only what is new


def test_self_play_has_a_sample_and_a_reward_for_each_player(games: Path, tmp_path: Path) -> None:
    game = "textarena: KuhnPoker-v0\nplayers: 2\nrows: 1\narguments: {max_rounds: 1}\n"
    played = _play(games, tmp_path, game, "[bet]", "[call]")
    assert played["samples"] == 2
    assert sorted(played["players"].values()) == [-1.0, 1.0]
    assert played["reward"] == played["players"]["0"]
    talks_on = _play(games, tmp_path, game, "[bet]", "x" * 600)
    assert sorted(talks_on["players"].values()) == [-1.0, 0.0]  # who bet has won nothing yet


def test_a_registered_environment_of_gymnasium_that_draws_itself(
    games: Path, tmp_path: Path
) -> None:
    lake = (
        "gymnasium: FrozenLake-v1\nrows: 1\nactions: [left, down, right, up]\n"
        "arguments: {render_mode: ansi, is_slippery: false}\n"
    )
    way = ["down", "down", "right", "right", "down", "right"]
    played = _play(games, tmp_path, lake, *way)
    assert (played["reward"], played["stop"]) == (1.0, "finished")


def test_an_environment_that_openenv_serves_and_its_server(games: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    served = (
        f"openenv: http://127.0.0.1:{port}\nrows: 1\nobservation: text\n"
        f"command: ['{games}', '{EXAMPLES / 'openenv_server.py'}', '{port}']\n"
    )
    played = _play(games, tmp_path, served, "a", "xyz")
    assert (played["reward"], played["stop"]) == (0.5, "finished")
    assert played["heard"] == ["Say 1 vowels.", "1 of 1."]
    with pytest.raises(ConnectionRefusedError):  # it ended with the loop
        socket.create_connection(("127.0.0.1", port))


def test_an_environment_of_verifiers_with_its_tools_and_its_rubric(
    verifiers: Path, tmp_path: Path
) -> None:
    call = {"name": "calculator", "arguments": {"expression": "50+98"}}
    asks = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    played = _play(verifiers, tmp_path, "verifiers: calc_env\nrows: 1\n", asks, "It is 148.")
    assert (played["reward"], played["stop"]) == (1.0, "finished")
    assert played["heard"] == ["What is 50 + 98?", "148"]
