"""The memory hand-over against real servers, whoever fails at whatever moment.

`HandOverMachine` runs steps of a colocated run on two servers over gRPC. Before a step, a fault may
be armed on a server: at its n-th operation the engine breaks, the server goes away, an answer gets
lost, or the trainer is killed. Whatever happens, a server samples only with all of its memory and
the version of the run, and an update never meets released weights.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from treadle.agent_loop import RequestContext, SamplingParams
from treadle.agent_loop.rpc import Requirements, connect
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
from treadle.trainer.config.schema import InlineTransportConfig, WeightSyncConfig
from treadle.trainer.policy.commands import Push, Specs
from treadle.trainer.policy.types import NamedTensor as Weight
from treadle.trainer.policy.types import TensorSpec
from treadle.trainer.training_loop.context import Run
from treadle.trainer.training_loop.memory_offload import HandOver
from treadle.trainer.weight_sync.client import WeightSyncClient
from treadle.trainer.weight_sync.errors import Outcome, WeightSyncError
from treadle.trainer.weight_sync.publisher import WeightPublisher
from treadle.trainer.weight_sync.transports.inline import push

_CONFIG = ServerConfig(shutdown_grace_s=0)
_SYNC = WeightSyncConfig(transport=InlineTransportConfig(), control_deadline_s=10)
_FAULTS = ("engine breaks", "server goes away", "answer is lost", "trainer is killed")


_ARMED = st.dictionaries(
    st.sampled_from("ab"), st.tuples(st.sampled_from(_FAULTS), st.integers(0, 6)), max_size=2
)
"""Server -> the fault that strikes it in a move, and after how many of its operations."""


class Fault:
    """Strikes once, at the n-th operation from now of the server that it is armed on."""

    def __init__(self, kind: str, after: int) -> None:
        self.kind = kind
        self._left = after

    def strikes(self, *kinds: str) -> bool:
        """Counts an operation at which only these kinds can strike."""
        if self.kind not in kinds:
            return False
        self._left -= 1
        return self._left == -1


class Engine(FakeEngine):
    """Notes what of its memory is away, and checks that nothing is done without it."""

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
    """Loses an answer of the server, which has done what it was asked."""

    fault = Fault("none", 0)

    async def _call(self, *arguments: Any) -> Any:
        answer = await super()._call(*arguments)
        if self.fault.strikes("answer is lost"):
            raise WeightSyncError("an answer is lost", Outcome.RESUME)
        return answer


class OneServer:
    """A server that is ended by the machine, by a fault, or with the run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self._task = asyncio.create_task(self._serve(started := asyncio.Event()))
        self._started = started

    async def _serve(self, started: asyncio.Event) -> None:
        self.engine = Engine()
        async with serve_in_process(self.engine, config=_CONFIG) as self.server:
            self.client = Client(
                self.name, self.server.address, control_deadline_s=10, commit_deadline_s=10
            )
            started.set()
            await self.ended.wait()

    async def start(self) -> "OneServer":
        await self._started.wait()
        return self

    @property
    def state(self) -> ServerState:
        return self.server.replica.state

    async def stop(self) -> None:
        self.ended.set()
        await self._task
        await self.client.aclose()


class Rotation:
    """As `ReplicaSet`; a server that has gone comes back when it is asked to."""

    def __init__(self) -> None:
        self.servers: dict[str, OneServer] = {}

    @property
    def live(self) -> Sequence[OneServer]:
        return list(self.servers.values())

    @property
    def clients(self) -> list[WeightSyncClient]:
        return [server.client for server in self.live]

    async def look(self, **options: bool) -> None:
        for server in self.live:
            if server.ended.is_set() or await server.client.engine_failed():
                await self.drop(server.name, "ended")

    async def revive(self) -> list[str]:
        new = [name for name in ("a", "b") if name not in self.servers]
        for name in new:
            self.servers[name] = await OneServer(name).start()
        return new

    async def drop(self, name: str, cause: str) -> None:
        await self.servers.pop(name).stop()


class Policy:
    """As `PolicyGroup`, with one weight."""

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="w", shape=(8,), element_type="float32", sender=0),)

    def export_weights(self) -> Iterator[Weight]:
        yield Weight(name="w", tensor=torch.arange(8.0))

    async def call(self, command: Specs | Push) -> list[Any]:
        if isinstance(command, Specs):
            return [self.weight_specs()]
        return [await asyncio.to_thread(push, self, command, rank=0)]


class HandOverMachine(RuleBasedStateMachine):
    """Steps of a run whose servers lend their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.run: Run
        self.rotation: Rotation
        self.lent = False

    @initialize(multi_stage=st.booleans(), interrupt=st.booleans())
    def begin(self, multi_stage: bool, interrupt: bool) -> None:
        self.multi_stage, self.interrupt = multi_stage, interrupt
        self.runner.run(self._begin(version=0))

    @rule(name=st.sampled_from("ab"))
    def end(self, name: str) -> None:
        """A server ends between two moves."""
        if name in self.rotation.servers:
            self.rotation.servers[name].ended.set()

    @rule(faults=_ARMED)
    def step(self, faults: Mapping[str, tuple[str, int]]) -> None:
        """Lends the memory, or publishes and takes it back: whichever is next."""
        self.runner.run(self._move(self._publish if self.lent else self._lend, faults))

    @rule(faults=_ARMED)
    def sample(self, faults: Mapping[str, tuple[str, int]]) -> None:
        if not self.lent:
            self.runner.run(self._move(self._sample, faults))

    @invariant()
    def nothing_is_done_without_its_memory(self) -> None:
        for server in self.rotation.live:
            assert not server.engine.wrong
            if server.state is ServerState.SERVING:
                assert not server.engine.away

    def teardown(self) -> None:
        self.runner.run(self._end_run())
        self.runner.close()

    async def _move(
        self, move: Callable[[], Awaitable[None]], faults: Mapping[str, tuple[str, int]]
    ) -> None:
        """Makes it; a run that fails or is killed is followed by one that goes on after it."""
        task = asyncio.ensure_future(move())
        for server in self.rotation.live:
            fault = Fault(*faults.get(server.name, ("none", 0)))
            server.engine.fault = server.client.fault = fault
            server.engine.ends = {
                "server goes away": server.ended.set,
                "trainer is killed": task.cancel,
            }
        try:
            await task
        except (asyncio.CancelledError, WeightSyncError):
            version = self.run.version
            await self._end_run()
            await self._begin(version)

    async def _begin(self, version: int) -> None:
        policy: Any = Policy()
        self.rotation = Rotation()
        await self.rotation.revive()
        parts: Any = dict.fromkeys(Run.__dataclass_fields__)
        parts |= {
            "replicas": self.rotation,
            "version": version,
            "publisher": WeightPublisher(
                policy, _SYNC, element_type="float32", directory=Path("unused")
            ),
            "hand_over": HandOver(
                self.rotation,
                multi_stage=self.multi_stage,
                interrupt=self.interrupt,
                max_attempts=2,
            ),
            "progress": SimpleNamespace(
                note=lambda _: None, phase=lambda _: contextlib.nullcontext()
            ),
        }
        self.run, self.lent = Run(**parts), False
        if version:
            await self.run.publish(version)

    async def _end_run(self) -> None:
        for server in self.rotation.live:
            await server.stop()

    async def _lend(self) -> None:
        await self.run.release_memory()
        self.lent = True
        for server in self.rotation.live:
            if not server.ended.is_set():
                assert server.engine.away == frozenset(MemoryKind)

    async def _publish(self) -> None:
        before = self.rotation.live
        await self.run.publish(self.run.version + 1)
        self.lent = False
        kept = {MemoryKind.KV_CACHE} if self.multi_stage else set()
        for server in self.rotation.live:
            if not server.ended.is_set():
                assert server.engine.weight_version == self.run.version
                assert server.state is ServerState.SERVING
                assert server.engine.away_at_update[-1] == (kept if server in before else set())

    async def _sample(self) -> None:
        """As a rollout begins: servers that ended are started again and given the weights."""
        await self.rotation.look()
        if revived := await self.rotation.revive():
            await self.run.republish(revived)
        for server in self.rotation.live:
            if server.ended.is_set():
                continue
            async with connect([server.server.address], requirements=Requirements()) as generator:
                completion = await generator.generate(
                    (1, 2, 3),
                    SamplingParams(max_tokens=2, ignore_eos=True),
                    request=RequestContext(
                        request_id="r",
                        session_id="s",
                        deadline=math.inf,
                        min_weight_version=self.run.version,
                    ),
                )
            versions = {chunk.weight_version for chunk in completion.chunks}
            assert versions == {self.run.version}


HandOverMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=12, deadline=None)
TestHandOver = HandOverMachine.TestCase
