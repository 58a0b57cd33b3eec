import os
import signal
import subprocess
import sys
from pathlib import Path

from treadle.rollout_server.testing.descendants import Descendants

PARENT = """
import multiprocessing, signal, sys
from treadle.rollout_server.engines.common import die_with_parent_test

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    context.Process(target=die_with_parent_test.late, args=sys.argv[1:]).start()
    signal.pause()
"""


def late(came: str, goes_on: str) -> None:
    """A child whose imports take longer than its parent lives."""
    from treadle.rollout_server.engines.common.die_with_parent import die_with_parent

    Path(came).write_text("")
    Path(goes_on).read_text()
    die_with_parent()
    signal.pause()


def test_a_process_that_is_still_starting_when_its_parent_is_killed_ends(tmp_path: Path) -> None:
    came, goes_on = tmp_path / "came", tmp_path / "goes_on"
    for fifo in (came, goes_on):
        os.mkfifo(fifo)  # Each end waits for the other one.
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(came), str(goes_on)],
        # Plain pytest has the source roots on sys.path only.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    came.read_text()
    left = Descendants(parent.pid)
    assert left
    parent.kill()
    parent.wait()
    goes_on.write_text("")
    left.wait_gone()
