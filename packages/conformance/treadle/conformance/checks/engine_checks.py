"""The engine contract from outside: the suite that our own engines pass, against any address."""

from collections.abc import Iterator

import pytest

from treadle.conformance.contracts.engine_contract import EngineContract
from treadle.conformance.contracts.remote_contract import RemoteContract
from treadle.conformance.settings import Settings


class Told(RemoteContract):
    """What the command line says of the server."""

    @pytest.fixture(autouse=True)
    def _take_settings(self, settings: Settings) -> Iterator[None]:
        self.long = settings.long
        self.draws = settings.draws
        self.places = settings.places
        self.caches_prefixes = settings.caches_prefixes
        yield


class CheckEngine(Told, EngineContract):
    """Sequences, pauses and updates."""
