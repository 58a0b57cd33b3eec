"""The engine contract about groups, from outside: the kit is the sender."""

import socket

import pytest

from treadle.conformance.checks.engine_checks import Told
from treadle.conformance.contracts.collective_contract import CollectiveContract
from treadle.conformance.settings import Settings
from treadle.rollout_server.address import Address


class CheckGroup(Told, CollectiveContract):
    """Loaded only where torch is, for a server that joins groups."""

    @pytest.fixture(autouse=True)
    def _take_host(self, settings: Settings) -> None:
        """Where packets to the server leave from; none is sent."""
        if settings.on_loopback:
            return
        host, port = Address.parse(settings.address)
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            self.sender_host = str(probe.getsockname()[0])
