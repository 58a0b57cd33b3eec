"""The engine contract about real models, from outside: against transformers."""

from pathlib import Path

import pytest

from treadle.conformance.checks.engine_checks import Told
from treadle.conformance.contracts.model_contract import ModelContract
from treadle.conformance.settings import Settings


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
