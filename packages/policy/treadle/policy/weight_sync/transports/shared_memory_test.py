import asyncio
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle.policy.client.types import ElementType, NamedTensor
from treadle.policy.testing.weights_only import FakeServer, Serve, Weights
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.payload import tensor_bytes, tensor_spec_to_proto
from treadle.policy.weight_sync.transports.shared_memory import Segment, Slots, _Filler
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

_SLOT = 2 * mmap.PAGESIZE


@pytest.fixture
def weights(weights: Weights) -> Weights:
    """Five tensors, of which one fills a slot and none shares one."""
    generator = torch.Generator().manual_seed(1)
    weights.tensors = {f"t{n}": torch.randn(1500, generator=generator) for n in range(4)}
    weights.tensors["largest"] = torch.randn(_SLOT // 4, generator=generator)
    return weights


async def _push(
    weights: Weights,
    *clients: WeightSyncClient,
    update_id: str = "u",
    bucket_bytes: int = 1,
    element_type: ElementType = "float32",
    split_tensors: bool = False,
) -> weights_pb.PushSharedMemoryResponse:
    specs = [tensor_spec_to_proto(spec, element_type) for spec in weights.weight_specs()]
    for client in clients:
        request = pb.BeginUpdateRequest(update_id=update_id, weight_version=1, tensors=specs)
        request.shared_memory.SetInParent()
        await client.begin(request)
    command = weights_pb.PushSharedMemoryRequest(
        update_id=update_id,
        element_type=element_type,
        targets=tuple(
            weights_pb.SharedMemoryTarget(name=c.name, address=c.address) for c in clients
        ),
        bucket_bytes=bucket_bytes,
        split_tensors=split_tensors,
        deadline_s=30,
    )
    report: weights_pb.PushSharedMemoryResponse = (await weights.call(command))[0]
    return report


async def _holds(
    fake: FakeServer,
    client: WeightSyncClient,
    weights: Weights,
    element_type: ElementType = "float32",
) -> bool:
    await client.commit("u", pb.IN_FLIGHT_POLICY_DRAIN)
    return fake.weights == {
        name: bytes(tensor_bytes(tensor, element_type)) for name, tensor in weights.tensors.items()
    }


@pytest.mark.asyncio
@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
async def test_every_server_reads_every_byte_from_the_same_slots(
    serve: Serve, weights: Weights, element_type: ElementType
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    report = await _push(weights, first, second, element_type=element_type)
    assert not report.errors
    assert not report.incompatible
    assert report.num_bytes == sum(map(len, one._staged.values()))
    assert one.slots == two.slots
    assert one.slots[:4] == [0, 1, 0, 1][: len(one.slots)]
    assert await _holds(one, first, weights, element_type)
    assert await _holds(two, second, weights, element_type)


@pytest.mark.asyncio
async def test_small_weights_travel_together(serve: Serve, weights: Weights) -> None:
    fake, client = await serve("one")
    await _push(weights, client, bucket_bytes=1 << 20)
    assert fake.slots == [0, 1]  # the second is empty: that was all
    assert await _holds(fake, client, weights)


@pytest.mark.asyncio
@pytest.mark.parametrize("element_type", ["float32", "bfloat16"])
async def test_weights_may_be_split_over_buckets(
    serve: Serve, weights: Weights, element_type: ElementType
) -> None:
    fake, client = await serve("one")
    bucket_bytes = mmap.PAGESIZE
    weights.tensors["turned"] = torch.randn(30, 50).T
    report = await _push(
        weights, client, bucket_bytes=bucket_bytes, element_type=element_type, split_tensors=True
    )
    assert report.errors == {}
    assert weights.sender._segment is not None
    assert weights.sender._segment.slot_bytes == bucket_bytes
    assert len(fake.slots) == 2 + report.num_bytes // bucket_bytes
    assert await _holds(fake, client, weights, element_type)


class _Reader:
    """A stream whose server reads every bucket at once."""

    def __init__(self, segment: Segment, slots: Slots) -> None:
        self.sizes: list[int] = []
        self.read: dict[int, bytes] = {}
        self._segment = segment
        self._slots = slots

    def send(self, bucket: pb.Bucket) -> None:
        start = end = self._segment.start(bucket.slot)
        for part in bucket.parts:
            assert part.start >= end, "parts overlap"
            end = part.start + part.length
            assert part.offset == len(self.read.setdefault(part.tensor_index, b""))
            self.read[part.tensor_index] += self._segment.view(part.start, part.length)
        self.sizes.append(end - start)
        self._slots.give_back("r", bucket.slot)


@given(
    sizes=st.lists(st.integers(0, 5000), max_size=8),
    bucket_bytes=st.integers(64, 9000),
    split=st.booleans(),
)
def test_every_byte_is_packed_once_in_order_and_within_its_slot(
    sizes: list[int], bucket_bytes: int, split: bool
) -> None:
    room = -(-bucket_bytes // 64) * 64
    largest = room if split else max(room, 4 * max(sizes, default=0))
    segment = Segment(num_slots=2, slot_bytes=largest)
    slots = Slots(2, ["r"])
    reader = _Reader(segment, slots)
    command = weights_pb.PushSharedMemoryRequest(
        update_id="u",
        element_type="float32",
        targets=(),
        bucket_bytes=bucket_bytes,
        deadline_s=1,
        split_tensors=split,
    )
    filler = _Filler(segment, slots, [reader], command)  # type: ignore[list-item]
    tensors = [torch.arange(size, dtype=torch.float32) + index for index, size in enumerate(sizes)]
    for index, tensor in enumerate(tensors):
        filler.put(index, tensor, tensor.nbytes)
    filler.finish()
    for index, tensor in enumerate(tensors):
        assert reader.read.get(index, b"") == tensor.numpy().tobytes()
    assert filler.num_bytes == sum(tensor.nbytes for tensor in tensors)
    *full, _, last = [room, *reader.sizes]
    assert last == 0
    assert all(size <= largest for size in full)
    if split:
        assert all(size > room - 64 for size in full), "buckets are filled before they are sent"


@pytest.mark.asyncio
async def test_a_slot_is_not_filled_again_before_the_slowest_server_has_read_it(
    serve: Serve, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slow, first), (quick, second) = await serve("slow"), await serve("quick")
    slow.push_waits_for = asyncio.Event()
    loop, export = asyncio.get_running_loop(), weights.export_weights
    third_is_due = threading.Event()

    def exporting() -> Iterator[NamedTensor]:
        for number, named in enumerate(export()):
            if number == 2:
                third_is_due.set()
            yield named

    monkeypatch.setattr(weights, "export_weights", exporting)
    pushing = asyncio.create_task(_push(weights, first, second))
    await asyncio.to_thread(third_is_due.wait)
    assert slow.slots == []
    loop.call_soon(slow.push_waits_for.set)
    assert (await pushing).errors == {}
    assert await _holds(slow, first, weights)
    assert await _holds(quick, second, weights)


@pytest.mark.asyncio
async def test_a_stream_that_breaks_leaves_the_others_alone_and_this_segment_to_its_reader(
    serve: Serve, weights: Weights
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    await _push(weights, first, second)
    kept = weights.sender._segment
    await _push(weights, first, second, update_id="v")
    assert weights.sender._segment is kept is not None
    one.break_after = 1
    report = await _push(weights, first, second, update_id="u")
    assert "one: PushBuckets failed (UNAVAILABLE): the connection broke" in report.errors["one"]
    assert list(report.errors) == ["one"]
    assert not report.incompatible
    assert await _holds(two, second, weights)
    assert weights.sender._segment is None


@pytest.mark.asyncio
async def test_a_server_on_another_host_is_incompatible(serve: Serve, weights: Weights) -> None:
    fake, client = await serve("one")
    fake.refuse["PushBuckets"] = "CAPABILITY_MISSING"
    report = await _push(weights, client)
    assert report.incompatible == ["one"]
    assert "PushBuckets was refused (CAPABILITY_MISSING)" in report.errors["one"]


@pytest.mark.asyncio
async def test_a_rank_that_sends_nothing_takes_part_and_no_memory(weights: Weights) -> None:
    command = weights_pb.PushSharedMemoryRequest(
        update_id="u", element_type="float32", targets=(), bucket_bytes=1, deadline_s=1
    )
    report = weights.sender.push(weights, command, rank=1)
    assert (report.num_bytes, weights.exports) == (0, 1)
    assert weights.sender._segment is None


# --- slots ---

_READERS = ["a", "b", "c"]
_SLOT_NUMBERS = st.integers(0, 1)


class SlotsMachine(RuleBasedStateMachine):
    """Against a model kept in the open: (slot, reader) pairs that are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(2, _READERS)
        self.here = set(_READERS)
        self.reading: set[tuple[int, str]] = set()

    @rule(slot=_SLOT_NUMBERS)
    def fill(self, slot: int) -> None:
        if not any(number == slot for number, _ in self.reading):
            self.slots.wait_until_free(slot)
            self.slots.hand_out(slot)
            self.reading |= {(slot, reader) for reader in self.here}

    @rule(slot=_SLOT_NUMBERS, reader=st.sampled_from(_READERS))
    def give_back(self, slot: int, reader: str) -> None:
        if (slot, reader) in self.reading:
            self.slots.give_back(reader, slot)
            self.reading.remove((slot, reader))
        else:
            with pytest.raises(ValueError, match=f"{reader} gave back slot {slot}"):
                self.slots.give_back(reader, slot)

    @rule(reader=st.sampled_from(_READERS))
    def leave(self, reader: str) -> None:
        self.slots.remove_reader(reader)
        self.here.discard(reader)
        self.reading = {(slot, other) for slot, other in self.reading if other != reader}

    @invariant()
    def those_who_are_here_are_known(self) -> None:
        assert self.slots.readers == self.here


TestSlotsMachine = SlotsMachine.TestCase


def test_a_slot_is_waited_for_until_the_last_reader_is_done_or_gone() -> None:
    slots = Slots(1, ["done", "gone"])
    slots.wait_until_free(0)
    slots.hand_out(0)
    taken = threading.Event()

    def take() -> None:
        slots.wait_until_free(0)
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    slots.give_back("done", 0)
    assert not taken.is_set()
    slots.remove_reader("gone")
    taken.wait()
    thread.join()


def test_a_slot_that_does_not_exist_is_refused() -> None:
    slots = Slots(1, ["a"])
    with pytest.raises(ValueError, match="slot 7"):
        slots.give_back("a", 7)


# --- the segment ---


@pytest.fixture
def segment() -> Segment:
    """Two slots."""
    return Segment(num_slots=2, slot_bytes=5000)


def test_slots_lie_behind_the_page_that_names_the_update(segment: Segment) -> None:
    assert (segment.slot_bytes, segment.num_bytes) == (8192, 4096 + 2 * 8192)
    assert [segment.start(0), segment.start(1)] == [4096, 4096 + 8192]
    segment.name_update("a-longer-name")
    segment.name_update("u")
    segment.view(segment.start(1), 3)[:] = b"abc"
    assert os.pread(segment.fd, 4096, 0) == b"u".ljust(4096, b"\0")
    assert os.pread(segment.fd, 3, segment.start(1)) == b"abc"


def test_it_cannot_shrink_under_a_reader(segment: Segment) -> None:
    assert fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:treadle-")


def test_it_goes_with_its_views_and_its_descriptor_at_once() -> None:
    segment = Segment(num_slots=1, slot_bytes=1)
    fd, view = segment.fd, segment.view(segment.start(0), 4)
    del segment
    view[:] = b"good"
    assert bytes(view) == b"good"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
