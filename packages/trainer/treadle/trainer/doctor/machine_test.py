"""Machines that lack something: real limits, and namespaces in which the kernel gives less."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from treadle.tools.sandbox.testing import why_no_user_namespaces
from treadle.tracing.diagnosis import Level
from treadle.trainer.doctor.machine import (
    check_disk,
    check_machine,
    check_open_files,
    check_proxy,
    check_shared_memory,
)
from treadle.trainer.launch.process import child_python_path

# Only a few MiB of shared memory, no loopback, no address of its name, no namespaces to be had.
_POOR = """
mount -t tmpfs -o size=8m tmpfs /dev/shm &&
hostname nowhere.invalid &&
echo 0 > /proc/sys/user/max_user_namespaces &&
exec "$@"
"""
_PROGRAM = """
import json
from treadle.trainer.doctor.machine import check_machine
print(json.dumps({f.check: [f.level.value, f.value, f.fix] for f in check_machine({})}))
"""


@contextmanager
def _open_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("soft", "level"), [(200, Level.FAIL), (1024, Level.WARN), (4096, Level.OK)]
)
def test_few_open_files(soft: int, level: Level) -> None:
    with _open_files(soft):
        finding = check_open_files(4096)
    assert (finding.level, finding.value) == (level, str(soft))
    assert level is Level.OK or "ulimit -n 65535" in finding.fix


def test_a_machine_that_is_fine() -> None:
    assert {f.check: f for f in check_machine({}) if f.level is Level.FAIL} == {}


@pytest.mark.skipif(why_no_user_namespaces() is not None, reason=str(why_no_user_namespaces()))
def test_a_machine_that_lacks_much() -> None:
    found = subprocess.run(
        ["unshare", "-rmnu", "sh", "-c", _POOR, "sh", sys.executable, "-c", _PROGRAM],
        env={"PYTHONPATH": child_python_path(), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    findings = json.loads(found.stdout)
    level, value, fix = findings["/dev/shm"]
    assert (level, value) == ("WARN", "0.0 GiB free")
    assert "--shm-size=32g --ipc=host" in fix
    assert findings["ports"][0] == "FAIL"
    assert "interface lo" in findings["ports"][2]
    level, value, fix = findings["host name"]
    assert (level, value) == ("WARN", "nowhere.invalid")
    assert "127.0.0.1 nowhere.invalid" in fix
    level, value, fix = findings["sandbox"]
    assert level == "WARN"
    assert "max_user_namespaces" in fix


def test_no_shared_memory_and_no_disk(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "none").level is Level.FAIL
    finding = check_disk(tmp_path / "runs" / "new", 1 << 60)
    assert finding.level is Level.WARN
    assert str(tmp_path) in finding.value


@pytest.mark.parametrize(
    ("environ", "level"),
    [
        ({"HTTP_PROXY": "http://proxy:3128"}, Level.WARN),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, Level.OK),
        ({}, Level.OK),
    ],
)
def test_a_proxy_that_is_asked_for_this_machine(environ: dict[str, str], level: Level) -> None:
    assert check_proxy(environ).level is level
