import subprocess
import sys
from pathlib import Path

import pytest

from treadle.rollout_server.engines.common.runtime_dir import RuntimeDir

KILLED = """
import os, signal, sys, tempfile
sys.path[:] = eval(sys.argv[2])
tempfile.tempdir = sys.argv[1]
from treadle.rollout_server.engines.common.runtime_dir import RuntimeDir
(RuntimeDir().path / "note").write_text("left")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_it_is_there_until_it_is_closed(parent: Path) -> None:
    runtime_dir = RuntimeDir()
    (runtime_dir.path / "socket").touch()
    assert list(parent.iterdir()) == [runtime_dir.path]
    runtime_dir.close()
    runtime_dir.close()
    assert not list(parent.iterdir())


def test_what_a_killed_process_left_is_removed_and_what_is_in_use_is_not(parent: Path) -> None:
    used = RuntimeDir()
    words = [sys.executable, "-c", KILLED, str(parent), repr(sys.path)]
    assert subprocess.run(words, check=False).returncode == -9
    assert len(list(parent.glob("*/note"))) == 1
    mine = RuntimeDir()
    assert sorted(parent.iterdir()) == sorted([used.path, mine.path])
    used.close()
    mine.close()
