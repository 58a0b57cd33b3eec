"""What the engine contract does not cover for SGLang: what is left of a server that is killed."""

import os
import signal
from pathlib import Path

from treadle.rollout_server.testing.descendants import Descendants, shm_files
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.rollout_server.testing.process import running_server


def test_nothing_outlives_a_server_that_is_killed(tiny_models: tuple[Path, Path]) -> None:
    arguments = ("--engine", "sglang", "--model.path", str(tiny_models[0]))
    with running_server(*arguments, command=engine_command("sglang")) as server:
        left = Descendants(server.popen.pid)
        made = shm_files(server.popen.pid)
        assert left and made
        os.killpg(server.popen.pid, signal.SIGKILL)  # with the processes that could clean up
        left.wait_gone()
        assert [path for path in made if path.exists()] == []
