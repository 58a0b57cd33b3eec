import importlib.util
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treadle.trainer.main import main


@contextmanager
def _serving(run: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "treadle.trainer.main", "view", str(run), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_run_is_served_until_it_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with _serving(tmp_path, "--port=0", "--no-browser") as process:
        assert process.stdout is not None
        address, _, token = process.stdout.readline().split()[0].partition("?token=")
        assert address.startswith("http://127.0.0.1:")
        request = urllib.request.Request(
            f"{address}api/runs/0/metrics", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request) as answer:
            assert b'"reward/mean":0.5' in answer.read()
        process.send_signal(signal.SIGINT)
        # uvicorn raises the signal again when it has closed, and the command reports it.
        assert process.wait() == 128 + signal.SIGINT


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(tmp_path), f"--port={port}", "--no-browser"]) == 2
    assert f"--port {port} of 127.0.0.1: Address already in use; name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["empty"], "empty is not a run directory: metrics.jsonl, status.json"),
        (["absent"], "absent is not a directory"),
        (["run", "run"], "is named twice"),
    ],
)
def test_what_is_no_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    assert main(["view", *(str(tmp_path / name) for name in names)]) == 2
    assert said in capsys.readouterr().err


def test_without_its_libraries_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "uvicorn" else find_spec(name, *rest),
    )
    assert main(["view", str(tmp_path)]) == 2
    assert "uvicorn is not installed: pip install 'treadle-tracing[viewer]'" in (
        capsys.readouterr().err
    )


def test_the_curves_of_a_run_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    assert main(["view", "--text", str(tmp_path)]) == 0
    assert "reward/mean" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["view", "--text", str(tmp_path), "--port=0"])
    assert "--text serves no page: leave out --port" in capsys.readouterr().err
