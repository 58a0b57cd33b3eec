"""The router's process: its arguments, its ready file, its end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.agent_loop.rpc.router import main as router


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--deterministic", "--margin", "4"], "--deterministic ignores loads"),
        (["--margin", "0"], "margin is 0"),
        (["--cache_tokens", "0"], "cache_tokens is 0"),
        (["--lease_s", "-1"], "--lease_s is -1.0"),
        (["--address", "localhost"], "--address is 'localhost'; expected host:port"),
        (["--address", "0.0.0.0:0"], "--tls_certificate, --tls_key, --token_file is not set"),
        (["--tls_key", "key.pem"], "--tls_certificate and --tls_key go together"),
        (["--token_file", "missing"], "No such file"),
        (["--replicas", "a:1"], "unrecognized arguments: --replicas"),
    ],
)
def test_arguments_that_are_not_valid(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        router.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_served_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert router.main(["--replica", "nowhere"]) == 1
    assert "replica 'nowhere' is not host:port" in capsys.readouterr().err


def test_the_process_serves_and_ends_by_a_signal(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    command = [sys.executable, "-m", "treadle.agent_loop.rpc.router", "--replica", "10.0.0.1:1"]
    process = subprocess.Popen(
        [*command, "--ready_file", str(ready)], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        line = next(line for line in process.stderr if "ready:" in line)
        assert json.loads(ready.read_text())["address"] in line
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert not ready.exists()
    finally:
        process.kill()
        process.communicate()
