"""Processes, servers and a network in simulated time, for the real server pool and router.

A launcher starts rollout servers and the run's router. What would open a gRPC channel gets one of
the simulated `Network`, which carries calls as they are, without bytes and sockets; the caller and
what answers are real. A server is what the pool and its clients ask of one: it says how it is, and
takes weights. What it samples is `routing_sim`. The router is the routing service's own servicer.

A server that dies stops answering at once, and its process ends.
"""

import asyncio
import itertools
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast
from unittest.mock import patch

import grpc
import grpc.aio

from treadle.agent_loop import StickySession
from treadle.agent_loop.clock import LoopClock
from treadle.agent_loop.rpc.router.server import RouterConfig, RoutingServicer
from treadle.agent_loop.rpc.router.session_queue import SessionQueue
from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import TensorSpec
from treadle.policy.config.weight_sync import WeightSyncConfig
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.publisher import PublishReport
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.policy.weight_sync.update_round import UpdateRound
from treadle.rollout.v1 import server_service_pb2 as server_pb
from treadle.rollout.v1 import weight_sync_service_pb2 as sync_pb
from treadle.tracing import current_sink
from treadle.trainer.launch.local import describe_exit
from treadle.trainer.launch.process import ProcessError, ProcessSpec

__all__ = ["Cluster", "Publisher", "SimulatedLauncher", "SimulatedProcess", "SimulatedServer"]

_CALL_S = 0.001
_WEIGHT = TensorSpec(name="weight", shape=(1,), element_type="bfloat16", sender=0)


class Network:
    """The simulated processes by address, and the calls to them."""

    def __init__(self) -> None:
        numbers = itertools.product(range(256), range(256), range(1, 255))
        self._addresses = (f"10.{i}.{k}.{m}:4000" for i, k, m in numbers)
        self._at: dict[str, object] = {}

    def listen(self, answers: object) -> str:
        """Returns the address at which its methods are called from now on."""
        address = next(self._addresses)
        self._at[address] = answers
        return address

    def close(self, address: str) -> None:
        """Takes the process at an address away."""
        self._at.pop(address, None)

    async def call(self, address: str, method: str, request: object) -> Any:
        """Calls a method.

        Raises:
            AioRpcError: Nobody answers.
        """
        await asyncio.sleep(_CALL_S)
        if (answers := self._at.get(address)) is None:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, metadata, metadata, f"nobody answers at {address}"
            )
        return await getattr(answers, method)(request, None)

    @contextmanager
    def carrying_calls(self) -> Iterator[None]:
        """Makes the channels that are opened in the block its own."""
        with patch("grpc.aio.insecure_channel", lambda address, **_: _Channel(self, address)):
            yield


@dataclass(frozen=True, slots=True)
class _Channel:
    """A channel, as far as the generated stubs use it."""

    network: Network
    address: str

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        method = path.rpartition("/")[2]
        return lambda request, **_: self.network.call(self.address, method, request)

    def unary_stream(self, path: str, **_: object) -> None:
        """Gives nothing to call: completions are simulated."""

    stream_unary = stream_stream = unary_stream

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class SimulatedServer:
    """A rollout server, as far as the pool asks it.

    Attributes:
        number: Of the replica.
        weight_version: That it samples from; a new one has the model directory's.
    """

    number: int
    weight_version: int = 0
    _updates: dict[str, int] = field(default_factory=dict)

    async def GetServerInfo(
        self, request: server_pb.GetServerInfoRequest, context: None
    ) -> server_pb.GetServerInfoResponse:
        """Fits every tokenizer."""
        return server_pb.GetServerInfoResponse(
            engine="simulated",
            state=server_pb.SERVER_STATE_SERVING,
            weight_version=self.weight_version,
            capabilities=server_pb.Capabilities(sampled_logprobs=True),
            model=server_pb.ModelInfo(vocab_size=1 << 18, context_length=1 << 20),
        )

    async def BeginUpdate(
        self, request: sync_pb.BeginUpdateRequest, context: None
    ) -> sync_pb.BeginUpdateResponse:
        """Notes the version."""
        self._updates = {request.update_id: int(request.weight_version)}
        return sync_pb.BeginUpdateResponse()

    async def CommitUpdate(
        self, request: sync_pb.CommitUpdateRequest, context: None
    ) -> sync_pb.CommitUpdateResponse:
        """Samples from the version from now on."""
        self.weight_version = self._updates[request.update_id]
        return sync_pb.CommitUpdateResponse(weight_version=self.weight_version)


class SimulatedProcess:
    """A program that serves after a while, and ends when the script says so.

    Args:
        name: In its spec.
        address: host:port at which it is answered.
        start_s: Seconds until it serves.
    """

    node = "simulated"

    def __init__(self, name: str, address: str, *, start_s: float) -> None:
        self.name = name
        self._address = address
        self._start_s = start_s
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ready(self, deadline_s: float) -> str:
        """Returns its address, once it serves.

        Raises:
            ProcessError: It ended first.
        """
        await asyncio.sleep(self._start_s)
        if self._status.done():
            raise ProcessError(f"{self.name} {self.describe_end(self._status.result())}")
        return self._address

    async def wait(self) -> int:
        """Returns its exit status, once it has one."""
        return await asyncio.shield(self._status)

    def describe_end(self, status: int) -> str:
        """See `Process`."""
        return describe_exit(status)

    async def log_tail(self, lines: int = 20) -> str:
        """Returns no line."""
        return ""

    async def stop(self, grace_s: float = 10.0) -> None:
        """Ends it."""
        self.end(0)

    def end(self, status: int) -> None:
        """Ends it with a status."""
        if not self._status.done():
            self._status.set_result(status)


class SimulatedLauncher:
    """Starts simulated processes.

    Args:
        listen: Lets what a spec asks for answer somewhere; returns the address.
        start_s: Seconds until a process serves.

    Attributes:
        processes: By address.
    """

    tls: None = None

    def __init__(self, listen: Callable[[ProcessSpec], str], *, start_s: float) -> None:
        self._listen = listen
        self._start_s = start_s
        self.processes: dict[str, SimulatedProcess] = {}

    async def start(self, spec: ProcessSpec) -> SimulatedProcess:
        """Starts one."""
        address = self._listen(spec)
        self.processes[address] = SimulatedProcess(spec.name, address, start_s=self._start_s)
        return self.processes[address]

    async def __aenter__(self) -> Self:
        """Does nothing."""
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Does nothing."""


class Cluster:
    """The servers and the router of a run, as a launcher starts them.

    Args:
        start_s: Seconds until a server serves.

    Attributes:
        network: What carries calls to them.
        launcher: What starts them.
        servers: Those that answer, by address.
    """

    def __init__(self, *, start_s: float) -> None:
        self.network = Network()
        self.launcher = SimulatedLauncher(self._listen, start_s=start_s)
        self.servers: dict[str, SimulatedServer] = {}
        self._queue: SessionQueue | None = None

    @property
    def queue(self) -> SessionQueue:
        """The router's, once it was started."""
        assert self._queue is not None, "the router was not started"
        return self._queue

    def kill(self, address: str) -> SimulatedServer:
        """Ends a server, as SIGKILL does."""
        self.network.close(address)
        self.launcher.processes[address].end(-signal.SIGKILL)
        return self.servers.pop(address)

    def _listen(self, spec: ProcessSpec) -> str:
        if spec.module.endswith(".router"):
            return self.network.listen(self._make_router(spec))
        server = SimulatedServer(int(spec.name.split("-")[1]))
        address = self.network.listen(server)
        self.servers[address] = server
        return address

    def _make_router(self, spec: ProcessSpec) -> RoutingServicer:
        config = RouterConfig()
        self._queue = SessionQueue(StickySession(), clock=LoopClock(), lease_s=config.lease_s)
        for option, value in itertools.pairwise(spec.args):
            if option == "--replica":
                self._queue.add(value)
        return RoutingServicer(self._queue, config, current_sink())


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """Gives weights to servers: the trainer's update round, without the bytes.

    Attributes:
        config: How they are sent.
        send_s: Seconds that the bytes take.
    """

    config: WeightSyncConfig
    send_s: float

    async def publish(self, version: int, servers: Sequence[WeightSyncClient]) -> PublishReport:
        """See `WeightPublisher.publish`."""
        update = UpdateRound(
            version=version,
            policy=cast(PolicyGroup, None),  # only what sends bytes asks its ranks
            config=self.config,
            element_type="bfloat16",
            security=ServerSecurity(),
            specs=(_WEIGHT,),
            live={server.name: server for server in servers},
        )
        await update.begin(update.begin_request())
        await asyncio.sleep(self.send_s)
        await update.commit()
        if not update.live:
            raise WeightSyncError("\n".join(update.failed.values()), Outcome.REPLACE)
        return PublishReport(
            version=version,
            num_bytes=update.num_bytes,
            sent_bytes=update.num_bytes,
            served=tuple(update.live),
            failed=update.failed,
            time_s=self.send_s,
        )
