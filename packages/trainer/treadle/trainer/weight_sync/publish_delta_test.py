import asyncio
import os
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from treadle.trainer.config.schema import (
    DeltaConfig,
    FileTransportConfig,
    InlineTransportConfig,
    SharedMemoryTransportConfig,
    WeightSyncConfig,
)
from treadle.trainer.policy.group import PolicyGroup
from treadle.trainer.weight_sync.conftest import Serve, Taker, Weights
from treadle.trainer.weight_sync.payload import tensor_bytes
from treadle.trainer.weight_sync.publisher import WeightPublisher

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


def holds(taker: Taker, weights: Weights) -> bool:
    return taker.weights == {
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
    taker, client = await serve("one")
    publisher = publisher_of(weights, tmp_path, transport=transport, full_every=2)
    for version in range(1, 8):
        weights.tensors["a"][0, 0] += 1
        if version == 6:
            for tensor in weights.tensors.values():
                tensor += 1
        await publisher.publish(version, [client])
        assert holds(taker, weights)
    assert taker.deltas == [False, True, True, False, True, False, True]


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
