import os
from pathlib import Path
from typing import cast

import pytest

from treadle.trainer.config.schema import (
    FileTransportConfig,
    InlineTransportConfig,
    WeightSyncConfig,
)
from treadle.trainer.policy_group import PolicyGroup
from treadle.trainer.weight_sync.conftest import Serve, Taker, Weights
from treadle.trainer.weight_sync.errors import WeightSyncError
from treadle.trainer.weight_sync.payload import tensor_bytes
from treadle.trainer.weight_sync.publisher import WeightPublisher

_INLINE = WeightSyncConfig(transport=InlineTransportConfig(chunk_bytes=4096))


def _publisher(weights: Weights, config: WeightSyncConfig, directory: Path) -> WeightPublisher:
    return WeightPublisher(
        cast(PolicyGroup, weights), config, element_type="float32", directory=directory
    )


def _holds(taker: Taker, weights: Weights) -> bool:
    wanted = {n: bytes(tensor_bytes(t, "float32")) for n, t in weights.tensors.items()}
    return taker.weights == wanted


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "config", [_INLINE, WeightSyncConfig(transport=FileTransportConfig())], ids=["inline", "file"]
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
        assert all(taker.version == version and _holds(taker, weights) for taker in (one, two))
    assert os.listdir(tmp_path) == []


@pytest.mark.asyncio
async def test_chunks_are_no_larger_than_the_server_takes(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    taker, client = await serve("one")
    taker.max_chunk_bytes = 100
    await _publisher(weights, _INLINE, tmp_path).publish(1, [client])
    assert taker.largest_chunk == 100
    assert _holds(taker, weights)


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
async def test_a_server_that_fails_its_commit_is_aborted_and_named(
    serve: Serve, weights: Weights, tmp_path: Path
) -> None:
    (one, first), (two, second) = await serve("one"), await serve("two")
    one.refuse["CommitUpdate"] = "ENGINE_FAILED"
    report = await _publisher(weights, _INLINE, tmp_path).publish(1, [first, second])
    assert report.served == ("two",)
    assert "one" in report.failed["one"]
    assert "ENGINE_FAILED" in report.failed["one"]
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
async def test_a_misfit_ends_the_run(serve: Serve, weights: Weights, tmp_path: Path) -> None:
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
    from treadle.trainer.weight_sync.client import WeightSyncClient

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
    taker, client = await serve("one")
    taker.push_waits_for = taker.renewed
    config = WeightSyncConfig(transport=InlineTransportConfig(), lease_s=1)
    report = await _publisher(weights, config, tmp_path).publish(1, [client])
    assert report.served == ("one",)


@pytest.mark.asyncio
async def test_a_server_that_hangs_does_not_cost_the_others_their_leases(
    serve: Serve, weights: Weights, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (hanging, first), (taker, second) = await serve("hanging"), await serve("other")
    hanging.get_waits_for = taker.renewed
    taker.push_waits_for = taker.renewed
    config = WeightSyncConfig(transport=InlineTransportConfig(), lease_s=1)
    report = await _publisher(weights, config, tmp_path).publish(1, [first, second])
    assert report.served == ("hanging", "other")
    assert "lease not renewed" not in caplog.text
