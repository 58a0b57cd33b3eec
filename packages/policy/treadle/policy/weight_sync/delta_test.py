"""The ranks' encoding, against an encoding made element by element; and publishing by delta."""

import asyncio
import os
import zlib
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import ElementType
from treadle.policy.config.weight_sync import (
    DeltaConfig,
    FileTransportConfig,
    InlineTransportConfig,
    SharedMemoryTransportConfig,
    WeightSyncConfig,
)
from treadle.policy.testing.weights_only import FakeServer, Serve, Weights
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.delta import DeltaSender, encode
from treadle.policy.weight_sync.payload import tensor_bytes
from treadle.policy.weight_sync.publisher import WeightPublisher

# --- the rank's side ---


@given(st.data(), st.integers(0, 40))
def test_the_changes_lead_from_the_old_to_the_new(data: st.DataObject, count: int) -> None:
    parts = st.binary(min_size=4 * count, max_size=4 * count)
    old, new = data.draw(parts), data.draw(parts)
    encoded = encode(memoryview(old), memoryview(new), "float32")
    assert encoded is not None
    assert FakeServer._changed(old, encoded) == new


def test_bits_are_compared_and_not_numbers() -> None:
    old = torch.tensor([0.0, float("nan"), 1.0, 2.0])
    new = torch.tensor([-0.0, float("nan"), 1.0, 3.0])
    encoded = encode(tensor_bytes(old, "float32"), tensor_bytes(new, "float32"), "float32")
    assert encoded is not None
    assert int.from_bytes(encoded[:8], "little") == 2
    assert np.frombuffer(encoded[8:16], "<u4").tolist() == [0, 3]


@pytest.mark.parametrize(("element_type", "share"), [("float32", 0.05), ("bfloat16", 0.1)])
def test_two_changes_of_a_hundred_take_less_than_a_tenth(
    element_type: ElementType, share: float
) -> None:
    old = torch.randn(100_000)
    new = old.clone()
    new[::50] += 1
    whole = tensor_bytes(new, element_type)
    encoded = encode(tensor_bytes(old, element_type), whole, element_type)
    assert encoded is not None and len(encoded) < share * len(whole)


def test_changes_are_against_the_version_that_is_kept_and_no_other() -> None:
    weights, sender = Weights(), DeltaSender()

    def compute(version: int, base: int | None) -> bool:
        command = weights_pb.ComputeDeltaRequest(
            version=version, base_version=base, element_type="float32"
        )
        return sender.compute(weights, command, rank=0).fits

    assert not compute(1, 0)
    assert compute(2, 1)
    assert not compute(3, 1)
    weights.tensors["a"][0, 0] += 1
    command = weights_pb.ComputeDeltaRequest(version=4, base_version=3, element_type="float32")
    report = sender.compute(weights, command, rank=0)
    assert report.encoded_bytes == {"a": 16, "b": 0, "empty": 0, "scalar": 0}


def test_a_file_of_changes_says_what_it_is(tmp_path: Path) -> None:
    weights, sender = Weights(), DeltaSender()
    for version, base in ((1, None), (2, 1)):
        weights.tensors["a"][1, 2] += 1
        command = weights_pb.ComputeDeltaRequest(
            version=version, base_version=base, element_type="float32"
        )
        sender.compute(weights, command, rank=0)
    write = weights_pb.WriteFilesRequest(
        directory=str(tmp_path), element_type="float32", version=2, base_version=1
    )
    report = sender.write(weights, write, rank=0)
    value = tensor_bytes(weights.tensors["a"][1, 2], "float32")
    encoded = (1).to_bytes(8, "little") + (7).to_bytes(4, "little") + bytes(value)
    (file,) = tmp_path.iterdir()
    with safe_open(file, "np") as opened:
        read = {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118
        assert opened.metadata() == {
            "weight_version": "2",
            "base_weight_version": "1",
            "element_type": "float32",
        }
    assert read == {"a": encoded, "b": b"", "empty": b"", "scalar": b""}
    assert report.crc32 == {name: zlib.crc32(data) for name, data in read.items()}
    assert report.num_bytes == len(encoded)
    assert sender.write(weights, write, rank=1).num_bytes == 0


# --- the driver's side ---

TRANSPORTS: dict[str, InlineTransportConfig | FileTransportConfig] = {
    "inline": InlineTransportConfig(chunk_bytes=4096),
    "file": FileTransportConfig(),
}
transports = pytest.mark.parametrize("transport", TRANSPORTS)


def publisher_of(
    weights: Weights,
    directory: Path,
    *,
    transport: str = "inline",
    full_every: int = 50,
    lease_s: float = 60,
) -> WeightPublisher:
    config = WeightSyncConfig(
        transport=TRANSPORTS[transport],
        delta=DeltaConfig(enabled=True, full_every=full_every),
        lease_s=lease_s,
    )
    return WeightPublisher(
        cast(PolicyGroup, weights), config, element_type="float32", directory=directory
    )


def holds(fake: FakeServer, weights: Weights) -> bool:
    return fake.weights == {
        n: bytes(tensor_bytes(t, "float32")) for n, t in weights.tensors.items()
    }


@pytest.mark.asyncio
@transports
async def test_the_first_version_goes_whole_and_then_what_changed(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, transport=transport)
    sent = []
    for version in range(1, 5):
        if version != 3:  # Nothing changed.
            weights.tensors["b"][version] += 1
        report = await publisher.publish(version, [first, second])
        assert report.served == ("one", "two")
        sent.append(report.sent_bytes)
        assert holds(one, weights) and holds(two, weights)
    assert one.deltas == two.deltas == [False, True, True, True]
    assert sent == [report.num_bytes, 16, 0, 16]


@pytest.mark.asyncio
@transports
async def test_a_server_that_came_late_or_lost_its_base_gets_everything_alone(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, transport=transport)
    await publisher.publish(1, [first])
    weights.tensors["a"][0, 0] += 1
    await publisher.publish(2, [first, second])
    two.base = None  # As after a restart.
    weights.tensors["a"][0, 1] += 1
    report = await publisher.publish(3, [first, second])
    assert sorted(report.served) == ["one", "two"]
    assert report.sent_bytes == (16 + report.num_bytes) / 2
    assert one.deltas == [False, True, True]
    assert two.deltas == [False, False]
    assert holds(one, weights) and holds(two, weights)
    await publisher.publish(3, [second])
    assert two.deltas == [False, False, False]


@pytest.mark.asyncio
@transports
async def test_a_server_that_refuses_its_commit_gets_everything_in_the_same_round(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str
) -> None:
    (one, first), (_, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, transport=transport)
    await publisher.publish(1, [first, second])
    weights.tensors["b"] += 1
    weights.tensors["b"][:600] -= 1
    one.refuse["CommitUpdate"] = "DELTA_BASE_MISMATCH"
    report = await publisher.publish(2, [first, second])
    assert sorted(report.served) == ["one", "two"] and not report.failed
    assert one.deltas == [False, False]
    assert holds(one, weights)


@pytest.mark.asyncio
@transports
async def test_everything_goes_when_it_is_due_and_when_it_is_less(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str
) -> None:
    fake, client = await serve("one")
    publisher = publisher_of(weights, tmp_path, transport=transport, full_every=2)
    for version in range(1, 8):
        weights.tensors["a"][0, 0] += 1
        if version == 6:
            for tensor in weights.tensors.values():
                tensor += 1
        await publisher.publish(version, [client])
        assert holds(fake, weights)
    assert fake.deltas == [False, True, True, False, True, False, True]


@pytest.mark.asyncio
async def test_a_server_that_could_not_read_changes_gets_everything_while_the_others_wait(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, transport="file")
    await publisher.publish(1, [first, second])
    weights.tensors["b"][0] += 1
    one.calls = two.calls = []
    one.refuse["BeginUpdate"] = "FILE_UNREADABLE"
    report = await publisher.publish(2, [first, second])
    assert (sorted(report.served), report.failed) == (["one", "two"], {})
    assert (one.deltas, two.deltas) == ([False, False], [False, True])
    assert one.calls[-2:] == ["CommitUpdate"] * 2
    assert holds(one, weights) and holds(two, weights)
    assert os.listdir(tmp_path) == []


class Refusals(dict[str, str]):
    """Of every call."""

    def pop(self, key: str, default: Any = None) -> Any:
        return self.get(key, default)


@pytest.mark.asyncio
async def test_a_server_that_cannot_read_anything_is_named_and_the_others_go_on(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, transport="file")
    await publisher.publish(1, [first, second])
    weights.tensors["b"][0] += 1
    one.refuse = Refusals(BeginUpdate="FILE_UNREADABLE")
    report = await publisher.publish(2, [first, second])
    assert report.served == ("two",) and "FILE_UNREADABLE" in report.failed["one"]
    assert holds(two, weights)
    one.refuse = {}
    report = await publisher.publish(2, [first])
    assert report.served == ("one",) and holds(one, weights)


def test_a_delta_needs_a_stream_and_a_copy() -> None:
    for fields in (
        {"transport": SharedMemoryTransportConfig()},
        {"transport": InlineTransportConfig(), "in_place": True},
    ):
        with pytest.raises(ValueError, match=r"sync\.delta\.enabled goes with"):
            WeightSyncConfig(delta=DeltaConfig(enabled=True), **fields)


@pytest.mark.asyncio
async def test_servers_that_hold_the_changes_keep_their_leases_while_another_gets_everything(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, lease_s=1)
    await publisher.publish(1, [first])
    weights.tensors["a"][0, 0] += 1
    two.push_waits_for = one.renewed
    report = await publisher.publish(2, [first, second])
    assert set(report.served) == {"one", "two"}
    assert one.deltas == [False, True]


@pytest.mark.asyncio
async def test_servers_that_hold_everything_keep_their_leases_while_the_others_commit(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = publisher_of(weights, tmp_path, lease_s=1)
    await publisher.publish(1, [first])
    weights.tensors["a"][0, 0] += 1

    class RenewedFromNow(asyncio.Event):
        async def wait(self) -> Literal[True]:
            two.renewed.clear()
            return await two.renewed.wait()

    one.commit_waits_for = RenewedFromNow()
    report = await publisher.publish(2, [first, second])
    assert set(report.served) == {"one", "two"}
    assert (one.deltas, two.deltas) == ([False, True], [False])
