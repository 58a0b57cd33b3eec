"""The engine contract from outside: the suites that our own engines pass, against any address.

`CheckGroup` needs torch, and `CheckModel` transformers too; the run leaves out the classes that
cannot run here.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.conformance.contracts.collective_contract import CollectiveContract
from treadle.conformance.contracts.engine_contract import EngineContract
from treadle.conformance.contracts.model_contract import ModelContract
from treadle.conformance.contracts.remote_contract import RemoteContract
from treadle.conformance.settings import KitSettings


class _FromCommandLine(RemoteContract):
    """Applies the command line's settings of the server to the suites."""

    @pytest.fixture(autouse=True)
    def _take_settings(self, settings: KitSettings) -> Iterator[None]:
        self.long = settings.long
        self.draws = settings.draws
        self.places = settings.places
        self.caches_prefixes = settings.caches_prefixes
        self.logprob_tolerance = max(self.logprob_tolerance, settings.tolerance)
        yield


class CheckGroup(_FromCommandLine, CollectiveContract):
    """Collective groups, for servers that join them; the kit is the sender."""

    @pytest.fixture(autouse=True)
    def _take_sender_host(self, settings: KitSettings) -> None:
        self.sender_host = settings.local_host()


class CheckEngine(_FromCommandLine, EngineContract):
    """Sequences, pauses and updates."""


class CheckModel(_FromCommandLine, ModelContract):
    """Real models, compared with transformers."""

    @pytest.fixture(autouse=True)
    def _take_model(self, settings: KitSettings) -> None:
        self.model_tolerance = settings.tolerance
        self.continue_recomputes = settings.continue_recomputes

    def checkpoint(self, which: int) -> Path:
        """Returns the directory of weight set 0 (what the server serves) or 1."""
        assert self.target.checkpoints is not None
        return self.target.checkpoints[which]
