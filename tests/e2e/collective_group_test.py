"""A collective group with both ends, in threads: real gloo, real stores, no server.

The trainer's and the rollout server's ends share no code, so this tests what they agree on.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from treadle.policy.client import types as policy
from treadle.policy.client.types import NamedTensor
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.transports import collective as sending
from treadle.policy.weight_sync.transports import collective_group
from treadle.policy.weight_sync.transports.collective import CollectiveSender
from treadle.rollout_server.engine import CollectiveGroup, ElementType, TensorSpec
from treadle.rollout_server.engines.common import collective as receiving
from treadle.rollout_server.engines.common import collective_group as receiving_group
from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.rollout_server.engines.common.collective_group import (
    GroupMember,
    StopSignal,
    encode_group,
    fail_group,
)
from treadle.rollout_server.errors import CollectiveBroken

CPU = torch.device("cpu")
SHAPES = {"a": (3, 5), "b": (700,), "none": (0, 4), "scalar": (), "c": (50, 8), "d": (9,)}
SENDERS = {"a": 0, "b": 0, "none": 0, "scalar": 0, "c": 2, "d": 2}
"""Ranks of the policy: 1 and 3 share the layers of 0 and 2, and send nothing."""
SPECS = tuple(
    TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=shape)
    for name, shape in SHAPES.items()
)
BUCKET_BYTES = 1 << 10
WORKER = """
import sys
import torch
from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.rollout_server.engines.common.collective_group import decode_group

for spec, _ in CollectiveMember(worker=1, device=torch.device("cpu")).receive(
    *decode_group(sys.argv[1])
):
    if spec.name == "d":
        print("has everything", flush=True)
        sys.stdin.read()
"""
"""The last worker, as a process that never writes the last tensor."""
BOTH = """
import threading
import torch
from treadle.rollout_server.engine import CollectiveGroup, ElementType, TensorSpec
from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.policy.client import types as policy
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.transports.collective import CollectiveSender

class Policy:
    def weight_specs(self):
        return (policy.TensorSpec(name="a", shape=(1,), element_type="float32", sender=0),)

    def export_weights(self):
        yield policy.NamedTensor(name="a", tensor=torch.ones(1))

sender = CollectiveSender(rank=0, host="127.0.0.1", device=torch.device("cpu"))
member = CollectiveMember(worker=0, device=torch.device("cpu"))
opened = weights_pb.OpenGroupRequest(rank=0, group_name="one", timeout_s=250.0)
rendezvous = sender.open_group(opened).rendezvous
command = weights_pb.BroadcastRequest(
    group_name="one", backend="gloo", rendezvous=rendezvous, world_size=2, bucket_bytes=4,
    element_type="float32", timeout_s=250.0,
)
sending = threading.Thread(target=sender.broadcast, args=(Policy(), command))
sending.start()
group = CollectiveGroup(
    backend="gloo", rendezvous=rendezvous, group_name="one", world_size=2, first_rank=1,
    bucket_bytes=4, senders=(0,),
)
spec = TensorSpec(name="a", element_type=ElementType.FLOAT32, shape=(1,))
print(*(tensor.item() for _, tensor in member.receive(group, (spec,))))
sending.join()
member.close()
sender.close()
"""
"""Both ends in one process, which ends as soon as it has left the group."""
Hook = Callable[[str], None]
Received = dict[str, torch.Tensor]


class Stage:
    """What one rank exports: the weights of its stage. `before` is called with each name."""

    def __init__(self, rank: int, values: Received, before: Hook = lambda name: None) -> None:
        self.exported: list[str] = []
        self._stage = rank - rank % 2
        self._values = values
        self._before = before

    def weight_specs(self) -> tuple[policy.TensorSpec, ...]:
        return tuple(
            policy.TensorSpec(name=name, shape=shape, element_type="float32", sender=SENDERS[name])
            for name, shape in SHAPES.items()
        )

    def export_weights(self) -> Iterator[NamedTensor]:
        for name, tensor in self._values.items():
            if SENDERS[name] == self._stage:
                self._before(name)
                self.exported.append(name)
                yield NamedTensor(name=name, tensor=tensor)


def weights(seed: int) -> Received:
    """One version, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Harness:
    """Four policy ranks and three workers of two servers: ranks 2, and 3 and 4."""

    def __init__(self, pool: ThreadPoolExecutor, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self.senders = [CollectiveSender(rank=r, host="127.0.0.1", device=CPU) for r in range(4)]
        self.members = [CollectiveMember(worker=number, device=CPU) for number in (0, 0, 1)]

    def open(self, name: str) -> list[CollectiveGroup]:
        """Opens a new group; returns it as each server is told of it."""
        command = weights_pb.OpenGroupRequest(rank=0, group_name=name, timeout_s=self._timeout_s)
        answers = [sender.open_group(command).rendezvous for sender in self.senders]
        assert answers[1:] == ["", "", ""] and answers[0]
        return [
            CollectiveGroup(
                backend="gloo",
                rendezvous=answers[0],
                group_name=name,
                world_size=5,
                first_rank=first_rank,
                bucket_bytes=BUCKET_BYTES,
                senders=tuple((0, 2).index(SENDERS[name]) for name in SHAPES),
            )
            for first_rank in (2, 3, 3)
        ]

    def send(
        self, group: CollectiveGroup, stages: Sequence[Stage]
    ) -> list["Future[weights_pb.BroadcastResponse]"]:
        """Starts to send from all four ranks."""
        command = weights_pb.BroadcastRequest(
            group_name=group.group_name,
            backend="gloo",
            rendezvous=group.rendezvous,
            world_size=group.world_size,
            bucket_bytes=group.bucket_bytes,
            element_type="float32",
            timeout_s=self._timeout_s,
        )
        return [
            self._pool.submit(sender.broadcast, stage, command)
            for sender, stage in zip(self.senders, stages, strict=True)
        ]

    def receive(
        self, groups: Sequence[CollectiveGroup], hooks: Sequence[Hook] | None = None
    ) -> list["Future[Received]"]:
        """Starts to receive at one worker per group, from the first worker on.

        A hook is called with each name before the tensor is copied.
        """
        hooks = hooks or [lambda name: None] * len(groups)
        return [
            self._pool.submit(received, member.receive(group, SPECS), hook)
            for member, group, hook in zip(self.members, groups, hooks, strict=False)
        ]

    def update(self, groups: Sequence[CollectiveGroup], values: Received) -> None:
        """Makes a whole update and checks that every worker has every bit of it."""
        stages = [Stage(rank, values) for rank in range(4)]
        reports = [future.result() for future in self.send_and_receive(groups, stages, values)]
        assert [report.error for report in reports] == [""] * 4
        assert [report.num_bytes > 0 for report in reports] == [True, False, True, False]

    def send_and_receive(
        self, groups: Sequence[CollectiveGroup], stages: Sequence[Stage], values: Received
    ) -> list["Future[weights_pb.BroadcastResponse]"]:
        futures = self.receive(groups)
        reports = self.send(groups[0], stages)
        for future in futures:
            got = future.result()
            assert {n: t.tolist() for n, t in got.items()} == {
                n: t.tolist() for n, t in values.items()
            }
        return reports


def received(
    stream: Generator[tuple[TensorSpec, torch.Tensor], None, None], hook: Hook
) -> Received:
    """Returns what a worker copies out of its buckets."""
    copies = {}
    with closing(stream):
        for spec, tensor in stream:
            hook(spec.name)
            copies[spec.name] = tensor.clone()
    return copies


@pytest.fixture
def harness() -> Iterator[Harness]:
    """Its timeout exceeds every test; what it started ends with the test."""
    with ExitStack() as stack:
        harness = Harness(stack.enter_context(ThreadPoolExecutor(max_workers=7)), timeout_s=250.0)
        for sender in harness.senders:
            stack.callback(sender.close)
        for member in harness.members:
            stack.callback(member.close)
        yield harness


def test_every_worker_gets_every_bit_of_every_update(harness: Harness) -> None:
    groups = harness.open("one")
    for version in range(3):
        harness.update(groups, weights(version))


def test_a_group_is_kept_until_another_is_named(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    join = GroupMember.join

    def counted(self: GroupMember, stop: StopSignal) -> None:
        joined.append(self.announced.group_name)
        join(self, stop)

    monkeypatch.setattr(GroupMember, "join", counted)
    first, second = harness.open("first"), harness.open("second")
    for groups in (first, first, second):
        harness.update(groups, weights(0))
    assert sorted(joined) == ["first"] * 3 + ["second"] * 3


def test_no_member_has_more_than_two_buckets(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, allocated = threading.Lock(), {"sent": [0], "received": [0]}

    def count(which: str, module: object) -> None:
        new_bucket = module._new_bucket  # type: ignore[attr-defined]

        def counting(num_bytes: int, device: torch.device) -> torch.Tensor:
            with lock:
                allocated[which].append(num_bytes)
            bucket: torch.Tensor = new_bucket(num_bytes, device)
            return bucket

        monkeypatch.setattr(module, "_new_bucket", counting)

    count("sent", sending)
    count("received", receiving)
    harness.update(harness.open("one"), weights(0))
    largest = 700 * 4  # Alone in its bucket, which is larger than `BUCKET_BYTES`.
    # Two senders: of three buckets, of which one is the largest, and of two.
    assert sorted(allocated["sent"][1:]) == [50 * 8 * 4] * 2 + [largest] * 2
    assert allocated["received"][1:] == [largest] * 6


def failed(future: "Future[Received]") -> str:
    """Returns the error of a worker that could not continue."""
    with pytest.raises(CollectiveBroken) as caught:
        future.result()
    return str(caught.value)


def test_a_worker_that_cannot_write_ends_the_update_for_all_and_is_named(harness: Harness) -> None:
    def break_at_c(name: str) -> None:
        if name == "c":
            raise ValueError("disk on fire")

    def nothing(name: str) -> None:
        pass

    groups = harness.open("first")
    stages = [Stage(rank, weights(0)) for rank in range(4)]
    receiving_futures = harness.receive(groups, [nothing, break_at_c, nothing])
    reports = [future.result() for future in harness.send(groups[0], stages)]
    with pytest.raises(ValueError, match="disk on fire"):
        receiving_futures[1].result()
    assert {rank for report in reports for rank in report.lost} == {3}
    assert not reports[1].error  # It sends nothing, and exports all the same.
    assert [len(stage.exported) for stage in stages] == [4, 4, 2, 2]
    for future in (receiving_futures[0], receiving_futures[2]):
        # They may have been sent everything by then.
        assert isinstance(future.exception(), CollectiveBroken | None)
    harness.update(harness.open("second"), weights(1))


def test_a_worker_that_does_not_come_is_named(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = harness.open("first")
    rank_store = harness.senders[0]._store
    assert rank_store is not None
    store = cast(Any, dist).PrefixStore("first", rank_store.store)

    def later() -> float:
        """The senders' clock: their time runs out once all others have joined."""
        return 300.0 if store.check([f"here/{rank}" for rank in range(4)]) else 0.0

    clock = SimpleNamespace(monotonic=later, sleep=time.sleep)
    monkeypatch.setattr(collective_group, "time", clock)
    futures = harness.receive(groups[:2])
    reports = harness.send(groups[0], [Stage(rank, weights(0)) for rank in range(4)])
    assert {rank for report in reports for rank in report.result().lost} == {4}
    for future in futures:
        assert "did not join" in failed(future)


def test_a_worker_that_dies_when_it_has_everything_is_missed_at_once(harness: Harness) -> None:
    groups = harness.open("first")
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, encode_group(groups[2], SPECS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        harness.receive(groups[:2])
        reports = harness.send(groups[0], [Stage(rank, weights(0)) for rank in range(4)])
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"has everything\n"
        worker.kill()
    assert [not report.result().error for report in reports] == [False, True, False, True]


def test_a_sender_that_fails_in_its_export_ends_the_update_for_all(harness: Harness) -> None:
    def break_at_d(name: str) -> None:
        if name == "d":
            raise ArithmeticError("no such weight")

    groups = harness.open("first")
    stages = [Stage(rank, weights(0), break_at_d) for rank in range(4)]
    futures = harness.receive(groups)
    reports = harness.send(groups[0], stages)
    with pytest.raises(ArithmeticError):
        reports[2].result()
    assert reports[0].result().error
    for future in futures:
        assert "group 'first'" in failed(future)


def test_a_group_that_ends_while_its_members_connect_leaves_no_thread_behind(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of other tests may wait for what gloo cannot abort, until the limit of the operation.
    others = set(receiving_group._detached)
    groups = harness.open("first")
    rank_store = harness.senders[0]._store
    assert rank_store is not None
    for sender in (0, 1):  # They say that they came, and then do not connect.
        rank_store.store.set(f"first/here/{sender}", b"")
    connecting = threading.Barrier(4)
    wait = receiving_group._WatchedStore.wait

    def wait_when_all_do(self: Any, keys: list[str], timeout: Any) -> None:
        if keys[0].endswith("/0"):  # What rank 0 of the backend, the sender, never writes.
            connecting.wait()
        wait(self, keys, timeout)

    monkeypatch.setattr(receiving_group._WatchedStore, "wait", wait_when_all_do)
    futures = harness.receive(groups)
    connecting.wait()
    fail_group(groups[0], "its lease ran out")
    for future in futures:
        assert "its lease ran out" in failed(future)
    for thread in set(receiving_group._detached) - others:
        thread.join()


def test_a_process_that_ends_when_it_has_left_ends_well() -> None:
    # CPython aborts if it ends while another thread is still inside torch.
    ended = subprocess.run([sys.executable, "-c", BOTH], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "1.0\n"), ended.stderr


@pytest.mark.parametrize("how", ["abort", "fail_group"])
@pytest.mark.parametrize("moment", ["joining", "receiving"])
def test_an_update_is_ended_from_outside(harness: Harness, how: str, moment: str) -> None:
    groups = harness.open("first")
    waits, goes_on = threading.Event(), threading.Event()

    def stand_at_d(name: str) -> None:
        if name == "d":
            goes_on.wait()

    def tell(name: str) -> None:
        waits.set()

    def nothing(name: str) -> None:
        pass

    # A sender that stands still, as one whose machine is gone does for the others.
    stages = [Stage(rank, weights(0), stand_at_d) for rank in range(4)]
    futures = harness.receive(groups, [tell, nothing, nothing])
    if moment == "receiving":
        reports = harness.send(groups[0], stages)
        waits.wait()
    if how == "abort":
        harness.members[0].abort("its lease ran out")
    else:
        fail_group(groups[0], "its lease ran out")
    if moment == "joining":
        reports = harness.send(groups[0], stages)
    try:
        for future in futures:
            assert "its lease ran out" in failed(future)
        assert reports[0].result().lost == [2]
    finally:
        goes_on.set()
    assert "its lease ran out" in reports[2].result().error
    harness.update(harness.open("second"), weights(1))


def test_nothing_listens_beyond_the_address_that_rank_0_is_reached_at(harness: Harness) -> None:
    def listening() -> set[str]:
        """Returns the addresses where this process listens, as the kernel writes them."""
        own = set()
        for link in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # The one that lists them.
                own.add(str(link.readlink()))
        lines = [
            line.split()
            for table in ("tcp", "tcp6")
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        ]
        return {
            fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in own
        }

    before = listening()
    harness.update(harness.open("one"), weights(0))
    new = listening() - before
    assert new and all(address.startswith("0100007F:") for address in new)
