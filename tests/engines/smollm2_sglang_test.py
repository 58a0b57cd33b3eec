"""SmolLM2-135M-Instruct behind a server that runs SGLang, and what is left of it when it is killed.

The last test kills the server's processes, so it comes last.
"""

import os
import signal

from engines.smollm2_contract import SmolContract

from treadle.conformance.contracts.remote_contract import Target
from treadle.rollout_server.testing.descendants import Descendants, shm_files

ENGINE = "sglang"
MODELS = "smollm2_models"
ARGUMENTS = ()


class TestSmolOnSglang(SmolContract):
    pass


def test_nothing_outlives_a_server_that_is_killed(target: Target) -> None:
    assert target.pid is not None
    left = Descendants(target.pid)
    made = shm_files(target.pid)
    assert left and made
    os.killpg(target.pid, signal.SIGKILL)  # with the processes that could clean up
    left.wait_gone()
    assert [path for path in made if path.exists()] == []
