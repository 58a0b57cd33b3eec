"""The whole engine contract, from outside, for a server with a real model."""

import contextlib
import os
import signal
from pathlib import Path

from treadle.conformance.contracts.engine_contract import EngineContract
from treadle.conformance.contracts.model_contract import ModelContract
from treadle.conformance.contracts.remote_contract import RemoteContract
from treadle.rollout_server.engine import Engine
from treadle.rollout_server.testing.descendants import descendants


class RemoteModelContract(RemoteContract, EngineContract, ModelContract):
    """Inherit, and define `ENGINE`, `MODELS` and `ARGUMENTS` in the module; see conftest.py."""

    # On a busy machine, an engine in another process runs ahead of its reader.
    long = 600
    places = 8

    def checkpoint(self, which: int) -> Path:
        assert self.target.checkpoints is not None
        return self.target.checkpoints[which]


class WorkerContract(RemoteModelContract):
    """For engines that run their model in worker processes, which can die."""

    async def break_engine(self, engine: Engine) -> None:
        """Kills every process that the server started."""
        assert self.target.pid is not None
        for pid in descendants(self.target.pid):
            with contextlib.suppress(ProcessLookupError):  # It ended together with another.
                os.kill(pid, signal.SIGKILL)
