"""After any interleaving a server holds exactly one complete version, and says which.

Real replicas in front of fake engines. Chunks are dropped, doubled, reordered and damaged, files
are damaged, cut short and swapped, bases of deltas are damaged and lost, trainers fall silent,
servers are replaced, engines refuse, completions run all the while; what is sampled is compared
with what the fake model gives for the version that labels it.
"""

import asyncio
import contextlib
import json
import struct
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle.rollout_server.config.schema import ServerConfig, WeightsConfig
from treadle.rollout_server.engine import (
    ElementType,
    EngineRequest,
    InFlightPolicy,
    ModelInfo,
    NamedTensor,
    Sampling,
    TensorSpec,
    Tokens,
)
from treadle.rollout_server.engines.fake.engine import FakeEngine, FakeLatency
from treadle.rollout_server.engines.fake.model import (
    Prefix,
    fingerprint_entry,
    fingerprint_of,
    logits,
    sample,
)
from treadle.rollout_server.errors import CapabilityMissing, RolloutServerError
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.scheduling.lifecycle import ServerState
from treadle.rollout_server.testing import FakeClock
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.delta import DeltaEncoding
from treadle.rollout_server.updates.files import WeightFiles

TENSORS = tuple(
    TensorSpec(name=name, element_type=ElementType.FLOAT8_E4M3FN, shape=(size,))
    for name, size in (("a", 5), ("b", 3), ("c", 0))
)
MODEL = ModelInfo(architecture="fake", vocab_size=64, context_length=64)
LEASE_S = 10.0
TOKEN_S = 0.01
SERVERS = 2
FILE_FAULTS = ("flip", "cut", "other base")
FAULTS = (*FILE_FAULTS, "base", "engine")
T = TypeVar("T")


def content(version: int, index: int) -> bytes:
    """Returns bytes of which a third changes from one version to the next."""
    return bytes(
        ((version + n) // 3 * 41 + index * 13 + n) % 251 for n in range(TENSORS[index].size_bytes)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """An update; a delta of `base` if there is one."""

    version: int
    base: int | None = None

    def payload(self, index: int) -> bytes:
        """Returns the bytes that are sent of a tensor."""
        new = content(self.version, index)
        if self.base is None:
            return new
        places = [n for n, old in enumerate(content(self.base, index)) if old != new[n]]
        head = struct.pack(f"<Q{len(places)}I", len(places), *places) if places else b""
        return head + bytes(new[n] for n in places)

    @property
    def delta(self) -> DeltaEncoding | None:
        if self.base is None:
            return None
        return DeltaEncoding(
            base_version=self.base,
            encoded_bytes=tuple(len(self.payload(index)) for index in range(len(TENSORS))),
            crc32=tuple(zlib.crc32(content(self.version, i)) for i in range(len(TENSORS))),
        )

    def begin(self, update_id: str, **how: Any) -> Begin:
        return Begin(
            update_id=update_id,
            weight_version=self.version,
            tensors=TENSORS,
            lease_s=LEASE_S,
            delta=self.delta,
            **how,
        )

    def write(self, path: Path, fault: str) -> WeightFiles:
        """Writes its file, perhaps not the announced one."""
        parts = [self.payload(index) for index in range(len(TENSORS))]
        base = -1 if fault == "other base" else self.base
        header: dict[str, Any] = {"__metadata__": {"base_weight_version": str(base)}}
        start = 0
        for spec, part in zip(TENSORS, parts, strict=True):
            header[spec.name] = {
                "dtype": "F8_E4M3" if self.base is None else "U8",
                "shape": [len(part)],
                "data_offsets": [start, start + len(part)],
            }
            start += len(part)
        text = json.dumps(header).encode()
        data = bytearray(struct.pack("<Q", len(text)) + text + b"".join(parts))
        if fault == "flip":
            data[-1] ^= 1
        path.mkdir(exist_ok=True)
        (path / "x.safetensors").write_bytes(data[:-1] if fault == "cut" else data)
        return WeightFiles(directory=path.name, crc32=tuple(map(zlib.crc32, parts)))


async def in_turn(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Replaces `asyncio.to_thread`, whose end depends on the machine."""
    await asyncio.sleep(0)
    return function(*arguments, **named)


def fingerprint(version: int) -> bytes:
    """Returns what the engine holds after all of a version and nothing else."""
    if version == 0:
        return b""
    tensors = [
        NamedTensor(spec=spec, data=memoryview(content(version, index)))
        for index, spec in enumerate(TENSORS)
    ]
    return fingerprint_of(map(fingerprint_entry, tensors))


class Engine(FakeEngine):
    """Refuses the load that it is told to, after some tensors."""

    def __init__(self, clock: FakeClock) -> None:
        latency = FakeLatency(decode_s_per_token=TOKEN_S)
        super().__init__(model=MODEL, parameters=TENSORS, latency=latency, clock=clock)
        self.refuse_after: int | None = None

    async def load_weights(
        self, tensors: AsyncIterator[NamedTensor], *, version: int, in_place: bool = False
    ) -> None:
        if self.refuse_after is not None:
            tensors, self.refuse_after = _cut(tensors, self.refuse_after), None
        await super().load_weights(tensors, version=version, in_place=in_place)


async def _cut(tensors: AsyncIterator[NamedTensor], left: int) -> AsyncIterator[NamedTensor]:
    async for tensor in tensors:
        if left == 0:
            raise CapabilityMissing("fake", "float8")
        left -= 1
        yield tensor


@dataclass(kw_only=True)
class Server:
    replica: Replica
    engine: Engine
    last_version: int = 0
    outputs: list[list[Tokens]] = field(default_factory=list)


class Versions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = FakeClock()
        self.tasks: set[asyncio.Task[None]] = set()
        self.trainers: set[asyncio.Task[None]] = set()
        self.updates: dict[str, Announced] = {}
        self.folder = tempfile.TemporaryDirectory()
        self.threads = mock.patch("asyncio.to_thread", in_turn)
        self.threads.start()
        self.servers = [self.run(self.start()) for _ in range(SERVERS)]

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def start(self) -> Server:
        config = ServerConfig(weights=WeightsConfig(directory=Path(self.folder.name)))
        replica, engine = Replica(config, self.clock), Engine(self.clock)
        replica.serve(engine)
        return Server(replica=replica, engine=engine)

    def spawn(
        self,
        work: Coroutine[Any, Any, object],
        turns: int,
        tasks: set[asyncio.Task[None]] | None = None,
    ) -> None:
        """Starts something that may be refused, and lets it run for some turns of the loop."""

        async def run() -> None:
            with contextlib.suppress(RolloutServerError):
                await work

        async def begin() -> None:
            (self.tasks if tasks is None else tasks).add(asyncio.create_task(run()))
            for _ in range(turns):
                await asyncio.sleep(0)

        self.run(begin())

    async def settle(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Lets time pass until the tasks have ended."""
        for task in tasks:
            for _ in range(200):
                if task.done():
                    break
                self.clock.advance(TOKEN_S)
                await asyncio.sleep(0)
            assert task.done(), "something waits forever"
            task.result()

    servers_ = st.integers(0, SERVERS - 1)
    turns_ = st.integers(0, 30)
    policies = st.sampled_from(InFlightPolicy)

    @rule(
        which=servers_,
        ahead=st.integers(0, 2),
        again=st.booleans(),
        in_place=st.none() | policies,
        turns=turns_,
    )
    def begin(
        self, which: int, ahead: int, again: bool, in_place: InFlightPolicy | None, turns: int
    ) -> None:
        if again and self.updates:
            update_id, announced = list(self.updates.items())[-1]
        else:
            update_id, announced = self.announce(ahead, None)
        begin = self._begin(which, update_id, announced, in_place=in_place)
        self.spawn(begin, turns)

    @rule(
        which=servers_,
        faults=st.lists(st.sampled_from(["", "file", *FAULTS]), max_size=5),
        policy=policies,
        turns=turns_,
    )
    def publish(self, which: int, faults: list[str], policy: InFlightPolicy, turns: int) -> None:
        self.spawn(self._publish(which, faults, policy), turns, self.trainers)

    async def _publish(self, which: int, faults: Iterable[str], policy: InFlightPolicy) -> None:
        """Publishes versions in turn: a delta of the last one, or all if that was refused."""
        base = None
        for fault in faults:
            update_id, announced = self.announce(1, base)
            base = None
            with contextlib.suppress(RolloutServerError):
                await self._publish_one(which, update_id, announced, fault, policy)
                base = announced.version

    async def _publish_one(
        self, which: int, update_id: str, announced: Announced, fault: str, policy: InFlightPolicy
    ) -> None:
        server = self.servers[which]
        updates = server.replica.updates
        if server.replica.current_update.live is not None:
            await updates.abort(server.replica.current_update.live.update_id)
        source = None
        if fault in ("file", *FILE_FAULTS):
            source = announced.write(Path(self.folder.name) / update_id, fault)
        await self._begin(which, update_id, announced, source=source, keep_base=True)
        if source is None:
            await self._push_the_rest(which, update_id)
        if fault == "engine":
            server.engine.refuse_after = 1
        if fault == "base" and updates._commit is None and updates._base is not None:
            updates._base.weights.view(0)[0] ^= 1  # Behind its back, but not while it is read.
        await self._commit(server, update_id, policy)

    @rule(turns=turns_)
    def the_trainers_die(self, turns: int) -> None:
        self.spawn(self._the_trainers_die(), turns)

    async def _the_trainers_die(self) -> None:
        for trainer in self.trainers:
            trainer.cancel()
        await asyncio.gather(*self.trainers, return_exceptions=True)
        self.trainers.clear()

    def announce(self, ahead: int, base: int | None) -> tuple[str, Announced]:
        version = self.newest + ahead
        update_id = f"u{len(self.updates)}"
        self.updates[update_id] = Announced(version=version, base=base or None)
        return update_id, self.updates[update_id]

    @property
    def newest(self) -> int:
        return max((announced.version for announced in self.updates.values()), default=0)

    async def _begin(self, which: int, update_id: str, announced: Announced, **how: Any) -> None:
        begin = announced.begin(update_id, **how)
        await self.servers[which].replica.updates.begin(begin)

    @rule(
        which=servers_,
        back=st.integers(0, 2),
        index=st.integers(0, len(TENSORS) - 1),
        offset=st.none() | st.integers(0, 4),
        length=st.integers(1, 5),
        damaged=st.booleans(),
        turns=turns_,
    )
    def push(
        self,
        which: int,
        back: int,
        index: int,
        offset: int | None,
        length: int,
        damaged: bool,
        turns: int,
    ) -> None:
        """Pushes a chunk, perhaps of an old update, or twice, early, or damaged."""
        ids = list(self.updates)[::-1]
        if back < len(ids):
            self.spawn(self._push(which, ids[back], index, offset, length, damaged), turns)

    async def _push(
        self, which: int, update_id: str, index: int, offset: int | None, length: int, damaged: bool
    ) -> None:
        update = self.servers[which].replica.current_update.find(update_id)
        await update.incoming.room()
        start = update.incoming.received[index] if offset is None else offset
        data = self.updates[update_id].payload(index)[start : start + length]
        crc32 = zlib.crc32(data) ^ damaged
        update.incoming.accept(index, start, crc32, data)

    @rule(which=servers_, turns=turns_)
    def push_the_rest(self, which: int, turns: int) -> None:
        if self.updates:
            self.spawn(self._push_the_rest(which, list(self.updates)[-1]), turns)

    async def _push_the_rest(self, which: int, update_id: str) -> None:
        find = self.servers[which].replica.current_update.find
        for index in range(len(TENSORS)):
            while not find(update_id).incoming.complete:
                received = find(update_id).incoming.received[index]
                if received == len(self.updates[update_id].payload(index)):
                    break
                await self._push(which, update_id, index, None, 2, False)

    @rule(which=servers_, back=st.integers(0, 1), policy=policies, turns=turns_)
    def commit(self, which: int, back: int, policy: InFlightPolicy, turns: int) -> None:
        ids = list(self.updates)[::-1]
        if back < len(ids):
            self.spawn(self._commit(self.servers[which], ids[back], policy), turns)

    async def _commit(self, server: Server, update_id: str, policy: InFlightPolicy) -> None:
        version = await server.replica.updates.commit(update_id, policy)
        assert version == self.updates[update_id].version <= server.replica.weight_version

    @rule(which=servers_, back=st.integers(0, 1), turns=turns_)
    def abort(self, which: int, back: int, turns: int) -> None:
        ids = list(self.updates)[::-1]
        if back < len(ids):
            self.spawn(self.servers[which].replica.updates.abort(ids[back]), turns)

    @rule(seconds=st.sampled_from([TOKEN_S, 5 * TOKEN_S, LEASE_S]), turns=turns_)
    def wait(self, seconds: float, turns: int) -> None:
        """Lets completions go on; the trainer is silent."""
        self.clock.advance(seconds)
        self.spawn(asyncio.sleep(0), turns)

    @rule(which=servers_)
    def replace_the_server(self, which: int) -> None:
        async def replace() -> Server:
            old = self.servers[which].replica
            old.stop()
            await self.settle([asyncio.create_task(old.aclose())])
            return await self.start()

        self.servers[which] = self.run(replace())

    @rule(which=servers_, after=st.integers(0, 2))
    def refuse_the_next_load(self, which: int, after: int) -> None:
        self.servers[which].engine.refuse_after = after

    @rule(which=servers_, pause=st.booleans(), policy=policies, turns=turns_)
    def pause_or_resume(self, which: int, pause: bool, policy: InFlightPolicy, turns: int) -> None:
        replica = self.servers[which].replica
        self.spawn(replica.pause(policy) if pause else replica.resume(), turns)

    @rule(which=servers_, prompt=st.integers(1, 60), turns=turns_)
    def generate(self, which: int, prompt: int, turns: int) -> None:
        server = self.servers[which]

        async def read() -> None:
            sampling = Sampling(max_tokens=6, temperature=1.0, seed=7, ignore_eos=True)
            request = EngineRequest(request_id="r", prompt=(prompt,), sampling=sampling)
            prefix = Prefix(request.prompt)
            async for event in server.replica.generate(request):
                if not isinstance(event, Tokens):
                    continue
                for token_id in event.token_ids:
                    candidates = logits(prefix, fingerprint(event.weight_version), 64)
                    wanted, _ = sample(
                        candidates, sampling, seen=prefix.seen, seed=7, position=prefix.length
                    )
                    assert token_id == wanted, "sampled from other weights than its label says"
                    list(prefix.extend((token_id,)))

        self.spawn(read(), turns)

    @invariant()
    def one_complete_version_serves(self) -> None:
        for server in self.servers:
            replica = server.replica
            assert replica.weight_version >= server.last_version
            server.last_version = replica.weight_version
            if replica.state in (ServerState.SERVING, ServerState.PAUSED):
                assert server.engine._fingerprint == fingerprint(replica.weight_version)
                assert server.engine.weight_version == replica.weight_version

    def teardown(self) -> None:
        """A trainer that starts over is served after any history, and nothing waits forever."""
        try:
            self.run(self._start_over())
        finally:
            self.loop.close()
            self.threads.stop()
            self.folder.cleanup()

    async def _clear(self, server: Server) -> None:
        """Ends the live update; a commit runs to its end."""
        while (live := server.replica.current_update.live) is not None:
            with contextlib.suppress(RolloutServerError):
                await server.replica.updates.abort(live.update_id)
            await asyncio.sleep(0)

    async def _start_over(self) -> None:
        await self._the_trainers_die()
        version = self.newest + 1
        self.updates["last"] = Announced(version=version)
        for which, server in enumerate(self.servers):
            await self.settle([asyncio.create_task(self._clear(server))])
            server.engine.refuse_after = None
            await server.replica.updates.begin(self.updates["last"].begin("last"))
            for index, spec in enumerate(TENSORS):
                for start in range(0, spec.size_bytes, 2):
                    await self._push(which, "last", index, start, 2, False)
            drain = self._commit(server, "last", InFlightPolicy.INTERRUPT)
            self.tasks.add(asyncio.create_task(drain))
        await self.settle(list(self.tasks))
        for server in self.servers:
            await server.replica.resume()
        await self.settle(self.tasks)
        for server in self.servers:
            assert server.replica.weight_version == version
            assert server.replica.state is ServerState.SERVING
        for which, server in enumerate(self.servers):  # And then may send changes, in either way.
            publish = self._publish(which, ["", "file", ""], InFlightPolicy.INTERRUPT)
            await self.settle([asyncio.create_task(publish)])
            assert server.replica.weight_version == self.newest
            assert server.engine._fingerprint == fingerprint(self.newest)
            await server.replica.aclose()


TestVersions = Versions.TestCase
TestVersions.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
