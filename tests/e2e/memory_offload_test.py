"""Memory offload against real servers, with faults at every operation.

`MemoryOffloadMachine` runs steps of a colocated run on two servers over gRPC. Before a step, a
fault may be armed on a server: at its n-th operation the engine breaks, the server goes away, an
answer gets lost, or the trainer is killed. In all cases a server samples only with all of its
memory and the version of the run, and an update never meets released weights.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from treadle.agent_loop import RequestContext, SamplingParams
from treadle.agent_loop.rpc import Requirements, connect
from treadle.policy.client.types import NamedTensor as Weight
from treadle.policy.client.types import TensorSpec
from treadle.policy.config.weight_sync import InlineTransportConfig, WeightSyncConfig
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.payload import specs_response
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.policy.weight_sync.transports.inline import push
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.engine import (
    InFlightPolicy,
    MemoryKind,
    ModelInfo,
    NamedTensor,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.testing import serve_in_process
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig
from treadle.trainer.launch.process import ProcessSpec
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.training_loop.context import TrainingContext
from treadle.trainer.training_loop.memory_offload import MemoryOffload

_CONFIG = ServerConfig(shutdown_grace_s=0)
_SYNC = WeightSyncConfig(transport=InlineTransportConfig(), control_deadline_s=10)
_NAMES = ("rollout-0", "rollout-1")
_RUN = Config(
    data=DataConfig(train_files=(Path("unused"),)),
    model=ModelConfig(path=Path("unused")),
    rollout=RolloutConfig(num_replicas=2, max_restarts=1000, release_memory=True),
)
_FAULTS = ("engine breaks", "server goes away", "answer is lost", "trainer is killed")


_ARMED = st.dictionaries(
    st.sampled_from(_NAMES), st.tuples(st.sampled_from(_FAULTS), st.integers(0, 6)), max_size=2
)
"""Server name -> (fault, number of operations before it strikes)."""


class Fault:
    """Strikes once, at the n-th operation from now of its server."""

    def __init__(self, kind: str, after: int) -> None:
        self.kind = kind
        self._left = after

    def strikes(self, *kinds: str) -> bool:
        """Counts an operation; returns whether the fault, if of these kinds, strikes now."""
        if self.kind not in kinds:
            return False
        self._left -= 1
        return self._left == -1


class Engine(FakeEngine):
    """Records which memory is released, and that nothing is done without it."""

    def __init__(self) -> None:
        model = ModelInfo(architecture="fake", vocab_size=64, context_length=64)
        super().__init__(model=model, clock=asyncio.get_running_loop())
        self.away: frozenset[MemoryKind] = frozenset()
        self.away_at_update: list[frozenset[MemoryKind]] = []
        self.wrong: list[str] = []
        self.fault = Fault("none", 0)
        self.ends: Mapping[str, Callable[[], object]] = {}

    def _operation(self) -> None:
        if self.fault.strikes("engine breaks"):
            raise RuntimeError("the engine breaks")
        if self.fault.strikes(*self.ends):
            self.ends[self.fault.kind]()

    async def pause(self, policy: InFlightPolicy) -> None:
        self._operation()
        await super().pause(policy)

    async def resume(self) -> None:
        if self.away:
            self.wrong.append(f"samples without {self.away}")
        self._operation()
        await super().resume()

    async def load_weights(self, tensors: AsyncIterator[NamedTensor], **options: Any) -> None:
        if MemoryKind.WEIGHTS in self.away:
            self.wrong.append("an update meets released weights")
        self.away_at_update.append(self.away)
        self._operation()
        await super().load_weights(tensors, **options)

    async def release_memory(self, kinds: frozenset[MemoryKind]) -> None:
        self._operation()
        await super().release_memory(kinds)
        self.away |= kinds

    async def restore_memory(self, kinds: frozenset[MemoryKind]) -> None:
        self._operation()
        await super().restore_memory(kinds)
        self.away -= kinds


class Client(WeightSyncClient):
    """Loses an answer of the server after the server has done its work."""

    fault = Fault("none", 0)

    async def _call(self, *arguments: Any) -> Any:
        answer = await super()._call(*arguments)
        if self.fault.strikes("answer is lost"):
            raise WeightSyncError("an answer is lost", Outcome.RESUME)
        return answer


class Server:
    """The process of a server; the machine, a fault, or the run ends it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.node = "here"
        self.ended = asyncio.Event()
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        self.engine = Engine()
        async with serve_in_process(self.engine, config=_CONFIG) as self.server:
            self._started.set()
            await self.ended.wait()

    @property
    def state(self) -> ServerState:
        return self.server.replica.state

    async def ready(self, deadline_s: float) -> str:
        await self._started.wait()
        return self.server.address

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    def describe_end(self, status: int) -> str:
        return "ended"

    async def log_tail(self, lines: int = 20) -> str:
        return ""

    async def stop(self, grace_s: float = 10.0) -> None:
        self.ended.set()
        await self._task


class Launcher:
    """Starts servers in this process."""

    tls: None = None

    async def start(self, spec: ProcessSpec) -> Server:
        return Server(spec.name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...


class Pool(ServerPool):
    """Its clients lose answers."""

    _EXIT_GRACE_S = 0.0

    def _open_client(self, name: str, address: str) -> Client:
        return Client(name, address, control_deadline_s=10, commit_deadline_s=10)

    @property
    def servers(self) -> list[tuple[Server, Client]]:
        """The processes and clients of the rotation."""
        return [cast(Any, (server.process, server.client)) for server in self.live]


class Policy:
    """Stands in for `PolicyGroup`, with one weight."""

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="w", shape=(8,), element_type="float32", sender=0),)

    def export_weights(self) -> Iterator[Weight]:
        yield Weight(name="w", tensor=torch.arange(8.0))

    async def call(
        self, command: weights_pb.GetWeightSpecsRequest | weights_pb.PushRequest
    ) -> list[Any]:
        if isinstance(command, weights_pb.GetWeightSpecsRequest):
            return [specs_response(self.weight_specs())]
        return [await asyncio.to_thread(push, self, command, rank=0)]


class MemoryOffloadMachine(RuleBasedStateMachine):
    """Steps of a run whose servers lend their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.context: TrainingContext
        self.pool: Pool
        self.lent = False

    @initialize(multi_stage=st.booleans(), interrupt=st.booleans())
    def begin(self, multi_stage: bool, interrupt: bool) -> None:
        self.multi_stage, self.interrupt = multi_stage, interrupt
        self.runner.run(self._begin(version=0))

    @rule(name=st.sampled_from(_NAMES))
    def end(self, name: str) -> None:
        """A server ends between two moves."""
        self.runner.run(self._end_server(name))

    @rule(faults=_ARMED)
    def step(self, faults: Mapping[str, tuple[str, int]]) -> None:
        """Releases the memory, or syncs weights and restores it: whichever is next."""
        self.runner.run(self._move(self._publish if self.lent else self._lend, faults))

    @rule(faults=_ARMED)
    def sample(self, faults: Mapping[str, tuple[str, int]]) -> None:
        if not self.lent:
            self.runner.run(self._move(self._sample, faults))

    @invariant()
    def nothing_is_done_without_its_memory(self) -> None:
        for server, _ in self.pool.servers:
            assert not server.engine.wrong
            if server.state is ServerState.SERVING:
                assert not server.engine.away

    def teardown(self) -> None:
        self.runner.run(self._end_run())
        self.runner.close()

    async def _move(
        self, move: Callable[[], Awaitable[None]], faults: Mapping[str, tuple[str, int]]
    ) -> None:
        """Makes the move; a run that fails or is killed is followed by one that resumes it."""
        task = asyncio.ensure_future(move())
        for server, client in self.pool.servers:
            fault = Fault(*faults.get(client.name, ("none", 0)))
            server.engine.fault = client.fault = fault
            server.engine.ends = {
                "server goes away": server.ended.set,
                "trainer is killed": task.cancel,
            }
        try:
            await task
        except (asyncio.CancelledError, WeightSyncError):
            version = self.context.version
            await self._end_run()
            await self._begin(version)

    async def _begin(self, version: int) -> None:
        policy: Any = Policy()
        publisher = WeightPublisher(policy, _SYNC, element_type="float32", directory=Path("unused"))
        self.pool = Pool(
            Launcher(), _RUN, publish=publisher.publish, weights_directory=Path("unused")
        )
        await self.pool.__aenter__()
        await self.pool.connect(Requirements())
        parts: Any = dict.fromkeys(TrainingContext.__dataclass_fields__)
        parts |= {
            "config": _RUN,
            "servers": self.pool,
            "memory_offload": MemoryOffload(
                self.pool,
                multi_stage=self.multi_stage,
                interrupt=self.interrupt,
                max_attempts=2,
            ),
            "record": SimpleNamespace(phase=lambda _: contextlib.nullcontext()),
        }
        self.context, self.lent = TrainingContext(**parts), False
        if version:
            await self.context.sync_weights(version)

    async def _end_run(self) -> None:
        await self.pool.__aexit__()

    async def _end_server(self, name: str) -> None:
        for server in self.pool.live:
            if server.name == name:
                cast(Any, server.process).ended.set()
                await server.ended

    async def _lend(self) -> None:
        await self.context.release_memory()
        self.lent = True
        for server, _ in self.pool.servers:
            if not server.ended.is_set():
                assert server.engine.away == frozenset(MemoryKind)

    async def _publish(self) -> None:
        before = self.pool.servers
        await self.context.sync_weights(self.context.version + 1)
        self.lent = False
        kept = {MemoryKind.KV_CACHE} if self.multi_stage else set()
        for server, client in self.pool.servers:
            if not server.ended.is_set():
                assert server.engine.weight_version == self.context.version
                assert server.state is ServerState.SERVING
                lent = (server, client) in before
                assert server.engine.away_at_update[-1] == (kept if lent else set())

    async def _sample(self) -> None:
        """As a rollout begins: servers that ended are restarted and given the weights."""
        await self.pool.ensure_healthy()
        request = RequestContext(
            request_id="r",
            session_id="s",
            deadline=math.inf,
            min_weight_version=self.context.version,
        )
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        for server, _ in self.pool.servers:
            if server.ended.is_set():
                continue
            async with connect([server.server.address], requirements=Requirements()) as generator:
                completion = await generator.generate((1, 2, 3), sampling, request=request)
            versions = {chunk.weight_version for chunk in completion.chunks}
            assert versions == {self.context.version}
        if any(not server.ended.is_set() for server, _ in self.pool.servers):
            # The run's own generator reaches one of them, whatever has happened to the others.
            completion = await self.pool.generator.generate((1, 2, 3), sampling, request=request)
            self.pool.generator.finish_session(request.session_id)
            assert {chunk.weight_version for chunk in completion.chunks} == {self.context.version}


MemoryOffloadMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=12, deadline=None
)
TestMemoryOffload = MemoryOffloadMachine.TestCase
