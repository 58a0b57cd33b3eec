import os
from pathlib import Path
from typing import cast

import pytest
import torch

from treadle.policy.client.group import PolicyGroup
from treadle.policy.config.weight_sync import (
    FileTransportConfig,
    InFlight,
    InlineTransportConfig,
    SharedMemoryTransportConfig,
    WeightSyncConfig,
)
from treadle.policy.testing.weights_only import FakeServer, Serve, Weights
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.policy.weight_sync.payload import tensor_bytes
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.policy.weight_sync.server_security import ServerSecurity
from treadle.rollout.v1 import weight_sync_service_pb2 as pb

_INLINE = WeightSyncConfig(transport=InlineTransportConfig(chunk_bytes=4096))


def _publisher(
    weights: Weights,
    config: WeightSyncConfig,
    directory: Path,
    *,
    security: ServerSecurity | None = None,
) -> WeightPublisher:
    return WeightPublisher(
        cast(PolicyGroup, weights),
        config,
        element_type="float32",
        directory=directory,
        security=security,
    )


def _holds(fake: FakeServer, weights: Weights) -> bool:
    wanted = {n: bytes(tensor_bytes(t, "float32")) for n, t in weights.tensors.items()}
    return fake.weights == wanted


_SHARED = WeightSyncConfig(transport=SharedMemoryTransportConfig())


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config",
    [_INLINE, WeightSyncConfig(transport=FileTransportConfig()), _SHARED],
    ids=["inline", "file", "shared_memory"],
)
async def test_every_server_gets_every_byte(
    serve: Serve, weights: Weights, tmp_path: Path, config: WeightSyncConfig
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    publisher = _publisher(weights, config, tmp_path)
    for version in (1, 2):
        weights.tensors["a"] += 1
        report = await publisher.publish(version, [first, second])
        assert (report.served, report.failed) == (("one", "two"), {})
        assert all(fake.version == version and _holds(fake, weights) for fake in (one, two))
    assert os.listdir(tmp_path) == []


@pytest.mark.asyncio
async def test_chunks_are_no_larger_than_the_server_takes(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    fake, client = await serve("one")
    fake.max_chunk_bytes = 100
    await _publisher(weights, _INLINE, tmp_path).publish(1, [client])
    assert fake.largest_chunk == 100
    assert _holds(fake, weights)


@pytest.mark.asyncio
async def test_a_broken_push_goes_on_where_it_broke(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.max_chunk_bytes, one.break_after = 1000, 1000
    report = await _publisher(weights, _INLINE, tmp_path).publish(1, [first, second])
    assert report.served == ("one", "two")
    assert _holds(one, weights)
    assert _holds(two, weights)
    assert one.calls.count("PushWeights") == 2
    assert two.calls.count("PushWeights") == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["inline", "file", "shared_memory"])
@pytest.mark.parametrize("call", ["BeginUpdate", "CommitUpdate"])
async def test_an_answer_that_got_lost_is_asked_for_again(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str, call: str
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.lose.add(call)
    config = WeightSyncConfig.model_validate({"transport": transport})
    report = await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert (report.served, report.failed) == (("one", "two"), {})
    assert one.calls.count(call) == two.calls.count(call) + 1
    assert _holds(one, weights)


@pytest.mark.asyncio
async def test_nobody_commits_before_all_hold_everything(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (_, second) = await serve("one"), await serve("two")
    one.break_after = 1
    order: list[str] = []
    one.calls = order
    await _publisher(weights, _INLINE, tmp_path).publish(1, [first, second])
    assert order.index("CommitUpdate") > max(
        place for place, call in enumerate(order) if call == "PushWeights"
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("in_flight", ["drain", "interrupt", "continue"])
async def test_servers_are_told_what_becomes_of_completions_in_flight(
    serve: Serve, weights: Weights, tmp_path: Path, in_flight: InFlight
) -> None:
    fake, client = await serve("one")
    config = WeightSyncConfig(in_flight=in_flight)
    await _publisher(weights, config, tmp_path).publish(1, [client])
    assert fake.in_flight == pb.InFlightPolicy.Value(f"IN_FLIGHT_POLICY_{in_flight.upper()}")


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["inline", "file", "shared_memory"])
async def test_in_place_servers_are_told_at_begin(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str
) -> None:
    fake, client = await serve("one")
    config = WeightSyncConfig.model_validate(
        {"transport": transport, "in_place": True, "in_flight": "interrupt"}
    )
    await _publisher(weights, config, tmp_path).publish(1, [client])
    assert fake.in_place == pb.IN_FLIGHT_POLICY_INTERRUPT
    assert _holds(fake, weights)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("in_place", "can", "split"),
    [
        (True, (True, True), True),
        (True, (True, False), False),
        (False, (False, False), True),
    ],
)
async def test_weights_are_split_over_buckets_where_every_server_takes_parts(
    serve: Serve,
    weights: Weights,
    tmp_path: Path,
    in_place: bool,
    can: tuple[bool, bool],
    split: bool,
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.split_tensors, two.split_tensors = can
    weights.tensors["large"] = torch.arange(20_000.0)
    transport = SharedMemoryTransportConfig(bucket_bytes=1 << 16)
    config = WeightSyncConfig(transport=transport, in_place=in_place)
    await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert any(one.part_offsets) is any(two.part_offsets) is split
    assert _holds(one, weights) and _holds(two, weights)


@pytest.mark.asyncio
@pytest.mark.parametrize("in_place", [False, True])
async def test_a_server_whose_stream_of_buckets_broke_is_begun_anew_and_gets_everything(
    serve: Serve, weights: Weights, tmp_path: Path, in_place: bool
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.break_after = 1
    config = _SHARED.model_copy(update={"in_place": in_place})
    report = await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert (set(report.served), report.failed) == ({"one", "two"}, {})
    assert _holds(one, weights)
    assert _holds(two, weights)
    assert one.calls.count("BeginUpdate") == 2
    assert one.calls.index("AbortUpdate") < one.calls.index("CommitUpdate")
    assert two.calls.count("BeginUpdate") == 1


@pytest.mark.asyncio
async def test_a_server_on_another_host_ends_the_run_and_says_what_to_do(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    one, first = await serve("one")
    one.refuse["PushBuckets"] = "CAPABILITY_MISSING"
    with pytest.raises(WeightSyncError, match="PushBuckets was refused") as caught:
        await _publisher(weights, _SHARED, tmp_path).publish(1, [first])
    assert caught.value.outcome is Outcome.FATAL


@pytest.mark.asyncio
@pytest.mark.parametrize("reason", ["ENGINE_FAILED", "UPDATE_UNKNOWN"])  # unknown: started again
async def test_a_server_that_fails_its_commit_is_aborted_and_named(
    serve: Serve, weights: Weights, tmp_path: Path, reason: str
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.refuse["CommitUpdate"] = reason
    report = await _publisher(weights, _INLINE, tmp_path).publish(1, [first, second])
    assert report.served == ("two",)
    assert "one" in report.failed["one"]
    assert reason in report.failed["one"]
    assert one.calls[-1] == "AbortUpdate"
    assert two.version == 1


@pytest.mark.asyncio
async def test_when_no_server_is_left_all_causes_are_named(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    one, first = await serve("one")
    one.refuse["BeginUpdate"] = "SHUTTING_DOWN"
    with pytest.raises(WeightSyncError, match=r"(?s)no rollout server took .*one .*SHUTTING_DOWN"):
        await _publisher(weights, _INLINE, tmp_path).publish(1, [first])


@pytest.mark.asyncio
async def test_an_incompatible_server_ends_the_run(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (_, second) = await serve("one"), await serve("two")
    one.refuse["BeginUpdate"] = "TENSOR_MISMATCH"
    with pytest.raises(WeightSyncError, match="TENSOR_MISMATCH"):
        await _publisher(weights, _INLINE, tmp_path).publish(1, [first, second])


@pytest.mark.asyncio
async def test_files_that_cannot_be_read_are_written_again(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.refuse["BeginUpdate"] = "FILE_UNREADABLE"
    config = WeightSyncConfig(transport=FileTransportConfig())
    report = await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert sorted(report.served) == ["one", "two"]
    assert one.version == two.version == 1
    assert weights.exports == 2


@pytest.mark.asyncio
async def test_a_server_that_is_gone_does_not_hold_up_the_others(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    from treadle.policy.weight_sync.client import WeightSyncClient

    two, second = await serve("two")
    gone = WeightSyncClient("gone", "127.0.0.1:1", control_deadline_s=5, commit_deadline_s=5)
    report = await _publisher(weights, _INLINE, tmp_path).publish(1, [gone, second])
    await gone.aclose()
    assert report.served == ("two",)
    assert "gone (127.0.0.1:1): BeginUpdate failed (UNAVAILABLE)" in report.failed["gone"]
    assert _holds(two, weights)


@pytest.mark.asyncio
async def test_the_lease_is_renewed_while_bytes_are_on_the_way(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    fake, client = await serve("one")
    fake.push_waits_for = fake.renewed
    config = WeightSyncConfig(transport=InlineTransportConfig(), lease_s=1)
    report = await _publisher(weights, config, tmp_path).publish(1, [client])
    assert report.served == ("one",)


@pytest.mark.asyncio
async def test_a_server_that_hangs_does_not_cost_the_others_their_leases(
    serve: Serve, weights: Weights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (hanging, first), (fake, second) = await serve("hanging"), await serve("other")
    hanging.get_waits_for = fake.renewed
    fake.push_waits_for = fake.renewed
    config = WeightSyncConfig(transport=InlineTransportConfig(), lease_s=1)
    report = await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert report.served == ("hanging", "other")
    assert "lease not renewed" not in caplog.text


@pytest.mark.asyncio
@pytest.mark.parametrize("transport", ["inline", "file", "shared_memory"])
async def test_a_server_that_begins_late_does_not_cost_the_others_their_leases(
    serve: Serve, weights: Weights, tmp_path: Path, transport: str
) -> None:
    (late, first), (fake, second) = await serve("late"), await serve("other")
    late.begin_waits_for = fake.renewed
    config = WeightSyncConfig.model_validate({"transport": transport, "lease_s": 1})
    report = await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert set(report.served) == {"late", "other"}


@pytest.mark.asyncio
async def test_servers_that_failed_are_freed_at_once_and_not_one_after_another(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    (three, third) = await serve("three")
    one.refuse["BeginUpdate"] = two.refuse["BeginUpdate"] = "ENGINE_FAILED"
    one.abort_waits_for, two.abort_waits_for = two.aborting, one.aborting
    report = await _publisher(weights, _INLINE, tmp_path).publish(1, [first, second, third])
    assert (report.served, set(report.failed)) == (("three",), {"one", "two"})
    assert _holds(three, weights)


@pytest.mark.asyncio
@pytest.mark.parametrize("config", [_INLINE, _SHARED], ids=["inline", "shared_memory"])
async def test_a_token_that_cannot_be_read_is_named(
    serve: Serve, weights: Weights, tmp_path: Path, config: WeightSyncConfig
) -> None:
    _, client = await serve("one")
    security = ServerSecurity(tls=False, token=tmp_path / "token")
    publisher = _publisher(weights, config, tmp_path, security=security)
    with pytest.raises(WeightSyncError, match=r"one: Push.*No such file.*token"):
        await publisher.publish(1, [client])
