"""The process, as its callers start it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import server_service_pb2 as srv

LIMIT_S = 60


@contextmanager
def started(ready_file: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Yields the process once it has logged that its ready file exists."""
    command = [sys.executable, "-m", "treadle.rollout_server", "--ready_file", str(ready_file)]
    process = subprocess.Popen(
        [*command, *arguments], stderr=subprocess.PIPE, text=True, env=_environment()
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "ready" in line:
                break
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        process.stderr.close()


def _environment() -> dict[str, str]:
    """Returns this interpreter's path, which a test runner may have set in another way."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def read_ready(path: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads(path.read_text())
    return values


def test_it_serves_writes_the_ready_file_and_ends_gracefully(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    with started(path, "--engine", "fake", "--model.context_length", "77") as process:
        ready = read_ready(path)
        assert ready["pid"] == process.pid
        with grpc.insecure_channel(str(ready["address"])) as channel:
            info = stubs_for(channel).control.GetServerInfo(
                srv.GetServerInfoRequest(), timeout=LIMIT_S
            )
        assert info.model.context_length == 77
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert not path.exists()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with started(tmp_path / "ready.json", "--parent_pid", str(parent.pid)) as process:
            assert process.poll() is None
            parent.kill()
            parent.wait(LIMIT_S)
            assert process.wait(LIMIT_S) == 0
    finally:
        parent.kill()
        parent.communicate(timeout=LIMIT_S)


def run(arguments: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "treadle.rollout_server", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=_environment(),
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--engin", "fake"], 2, "did you mean --engine"),
        (["--engine", "vlm"], 1, "unknown engine 'vlm': use one of fake, sglang, torch, vllm"),
        (["--model.path", "/nowhere"], 2, "model.path=/nowhere does not exist"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_a_code(
    arguments: list[str], code: int, message: str
) -> None:
    done = run(arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_with_the_json_format_a_failed_start_is_an_object_too() -> None:
    done = run(["--engine", "vlm", "--log_format", "json"])
    assert done.returncode == 1
    line = json.loads(done.stderr)
    assert line["level"] == "CRITICAL"
    assert "unknown engine 'vlm'" in line["message"]


def test_the_doctor_is_the_first_word() -> None:
    done = run(["doctor", "--engine", "fake"])
    assert done.returncode == 0, done.stdout
    assert "FAIL" in done.stdout.splitlines()[-1]
