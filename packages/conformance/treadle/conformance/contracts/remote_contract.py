"""What lets the engine contract run against a server: how one server serves many tests.

Invariant: each test finds the weights it asks for in the server, nothing in flight, and empty
prefix caches, since an update opens it; where there are no weights to send, the server's own
serve as set 0, and tests that need others are skipped.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import pytest

from treadle.conformance.client.checkpoint import read_checkpoint, specs_of
from treadle.conformance.client.remote_engine import RemoteEngine, connect_engine
from treadle.conformance.contracts.contract_base import ContractBase, need
from treadle.conformance.contracts.reader import stream
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout_server.engine import Engine, InFlightPolicy, NamedTensor

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


def plain_channel(address: str) -> grpc.aio.Channel:
    """A channel without TLS."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def tls_channel(ca: bytes, address: str) -> grpc.aio.Channel:
    """A channel to a server whose certificate `ca` signed, or is."""
    credentials = grpc.ssl_channel_credentials(ca)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test.

    Attributes:
        address: host:port.
        channel: Opens a channel to it, in the event loop that runs.
        checkpoints: Directories of weight sets 0 and 1; set 0 is what it was started with.
            None: there are none to send.
        pid: Of its process, where the test owns it.
        metadata: What every call carries, as a bearer token.
    """

    address: str
    channel: Callable[[str], grpc.aio.Channel] = plain_channel
    checkpoints: tuple[Path, Path] | None = None
    pid: int | None = None
    metadata: tuple[tuple[str, str], ...] = ()


class RemoteContract(ContractBase):
    """Inherit before a contract, and give the module a fixture `target`."""

    ends = False
    target: Target

    @pytest.fixture(autouse=True)
    def _find_target(self, target: Target) -> None:
        self.target = target
        self.fresh = target.checkpoints is not None

    def engine(self, weights: int = 0) -> AbstractAsyncContextManager[Engine]:
        """The server, updated to a weight set."""
        return self._connected(weights)

    @asynccontextmanager
    async def _connected(self, weights: int) -> AsyncIterator[Engine]:
        tensors = None if self.target.checkpoints is None else self.weights(weights)
        need(tensors is not None or weights == 0, "no other weights to send: give a checkpoint")
        parameters = None if tensors is None else specs_of(list(tensors))
        async with (
            self.target.channel(self.target.address) as channel,
            connect_engine(channel, parameters=parameters, metadata=self.target.metadata) as engine,
        ):
            if tensors is not None:
                await _settle(engine, tensors)
            yield engine

    def weights(self, which: int) -> Sequence[NamedTensor]:
        """The tensors of a checkpoint."""
        if self.target.checkpoints is None:
            pytest.skip("no weights to send: give a checkpoint")
        return read_checkpoint(self.target.checkpoints[which])

    def takes_in_place(self, engine: Engine) -> bool:
        """As the server says."""
        assert isinstance(engine, RemoteEngine)
        return engine.server.capabilities.in_place_update


async def _settle(engine: RemoteEngine, tensors: Sequence[NamedTensor]) -> None:
    """Ends what an earlier test left behind, and loads weights."""
    if engine.server.state == srv.SERVER_STATE_LOADING:  # Torn in place: only this helps.
        await engine.load_weights(stream(tensors), version=engine.weight_version + 1)
    await engine.pause(InFlightPolicy.INTERRUPT)
    await engine.load_weights(stream(tensors), version=engine.weight_version + 1)
    await engine.resume()
