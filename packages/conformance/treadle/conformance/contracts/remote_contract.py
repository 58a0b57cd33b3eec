"""Runs the engine contract against a server; one server serves many tests.

Invariant: each test starts with the weight set that it names and with nothing in flight. Unless
`fresh` is false, it begins with an update, so prefix caches are empty. If there are no weights to
send, the server's weights count as set 0, and tests that need set 1 are skipped.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest

from treadle.conformance.client.checkpoint import read_checkpoint, specs_of
from treadle.conformance.client.remote_engine import RemoteEngine, connect_engine
from treadle.conformance.contracts.contract_base import ContractBase, skip_unless
from treadle.conformance.contracts.reader import stream
from treadle.rollout.v1 import server_service_pb2 as srv
from treadle.rollout_server.engine import Engine, InFlightPolicy, NamedTensor

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


def plain_channel(address: str) -> grpc.aio.Channel:
    """Opens a channel without TLS."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def tls_channel(ca: bytes, address: str) -> grpc.aio.Channel:
    """Opens a channel to a server whose certificate `ca` signed, or is."""
    credentials = grpc.ssl_channel_credentials(ca)
    return grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test.

    Attributes:
        address: The host:port of the server.
        channel: Opens a channel to the address, in the running event loop.
        checkpoints: Directories of weight sets 0 and 1; the server was started with set 0. None
            if there are no weights to send.
        pid: The server's process id, if the test owns the process.
        metadata: Metadata of every call, such as a bearer token.
        loaded: The weight set of each version with which a test began.
    """

    address: str
    channel: Callable[[str], grpc.aio.Channel] = plain_channel
    checkpoints: tuple[Path, Path] | None = None
    pid: int | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    loaded: dict[int, int] = field(default_factory=dict)


class RemoteContract(ContractBase):
    """Inherit from this before a contract, and define a fixture `target` in the module.

    A subclass for a large model sets `fresh` to False: a test then begins with an update only if
    the server does not hold the weight set that the test names.
    """

    ends = False
    target: Target

    @pytest.fixture(autouse=True)
    def _find_target(self, target: Target) -> None:
        self.target = target
        self.fresh = self.fresh and target.checkpoints is not None

    def engine(self, weights: int = 0) -> AbstractAsyncContextManager[Engine]:
        """Returns the server, updated to a weight set."""
        return self._connected(weights)

    @asynccontextmanager
    async def _connected(self, weights: int) -> AsyncIterator[Engine]:
        tensors = None if self.target.checkpoints is None else self.weights(weights)
        skip_unless(
            tensors is not None or weights == 0, "needs weights to send: set Target.checkpoints"
        )
        parameters = None if tensors is None else specs_of(list(tensors))
        async with (
            self.target.channel(self.target.address) as channel,
            connect_engine(channel, parameters=parameters, metadata=self.target.metadata) as engine,
        ):
            if tensors is not None:
                await self._settle(engine, weights, tensors)
            yield engine

    async def _settle(
        self, engine: RemoteEngine, weights: int, tensors: Sequence[NamedTensor]
    ) -> None:
        """Ends what an earlier test left running, and loads weights."""
        if engine.server.state == srv.SERVER_STATE_LOADING:  # Only a whole update repairs them.
            await engine.load_weights(stream(tensors), version=engine.weight_version + 1)
        await engine.pause(InFlightPolicy.INTERRUPT)
        loaded = self.target.loaded
        if self.fresh or loaded.get(engine.weight_version) != weights:
            await engine.load_weights(stream(tensors), version=engine.weight_version + 1)
            loaded[engine.weight_version] = weights
        await engine.resume()

    def weights(self, which: int) -> Sequence[NamedTensor]:
        """Returns the tensors of a checkpoint."""
        if self.target.checkpoints is None:
            pytest.skip("needs weights to send: set Target.checkpoints")
        return read_checkpoint(self.target.checkpoints[which])

    async def update_in_flight(
        self, engine: Engine, tensors: Sequence[NamedTensor], version: int
    ) -> None:
        """Updates without a pause before it, which would refuse calls that have no token yet."""
        assert isinstance(engine, RemoteEngine)
        policy = InFlightPolicy.CONTINUE
        await engine.load_weights(stream(tensors), version=version, in_flight=policy)

    def takes_in_place(self, engine: Engine) -> bool:
        """Returns the server's capability."""
        assert isinstance(engine, RemoteEngine)
        return engine.server.capabilities.in_place_update
