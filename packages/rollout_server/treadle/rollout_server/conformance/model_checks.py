"""The engine contract about real models, from outside: against transformers."""

from pathlib import Path

import pytest

from treadle.rollout_server.conformance.engine_checks import Told
from treadle.rollout_server.conformance.settings import Settings
from treadle.rollout_server.testing.model_contract import ModelContract


class CheckModel(Told, ModelContract):
    """Loaded only where transformers is."""

    @pytest.fixture(autouse=True)
    def _take_model(self, settings: Settings) -> None:
        self.model_tolerance = settings.tolerance
        self.continue_recomputes = settings.continue_recomputes

    def checkpoint(self, which: int) -> Path:
        """What the server was told to serve, or its other set of weights."""
        assert self.target.checkpoints is not None
        return self.target.checkpoints[which]
