"""The torch engine as the only worker of a group whose sender is the test."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from treadle.conformance.client.collective_sender import TensorBroadcaster
from treadle.rollout_server.engine import InFlightPolicy, NamedTensor
from treadle.rollout_server.engines.common.collective import CollectiveMember
from treadle.rollout_server.engines.common.collective_group import GroupMember
from treadle.rollout_server.engines.torch.testing.text_model import (
    ModelDir,
    complete,
    hf_greedy,
    named_tensors,
    serving,
)
from treadle.rollout_server.errors import TensorMismatch

PROMPT = [5, 6, 7]


@contextmanager
def sending(
    sender: TensorBroadcaster, tensors: list[NamedTensor], *, num_buckets: int | None = None
) -> Iterator[None]:
    """Sends in a thread for as long as the block lasts."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        future = pool.submit(sender.send, tensors, num_buckets=num_buckets)
        yield
    future.result()
    sender.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
async def test_what_is_received_is_sampled_from(model_dir: ModelDir, architecture: str) -> None:
    old, new = model_dir(architecture, seed=0), model_dir(architecture, seed=1)
    tensors = named_tensors(new)
    sender = TensorBroadcaster(tensors)
    async with serving(old) as engine:
        specs = [tensor.spec for tensor in tensors]
        await complete(engine, PROMPT)  # Its prefix must not serve the new weights.
        await engine.pause(InFlightPolicy.DRAIN)
        with sending(sender, tensors):
            await engine.receive_weights(sender.group, specs, version=3)
        await engine.resume()
        answer = await complete(engine, PROMPT)
    assert answer.ids == hf_greedy(new, PROMPT, 12)
    assert set(answer.versions) == {3}


@pytest.mark.asyncio
async def test_cancelling_ends_the_receiving(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_dir("qwen2", seed=0)
    tensors = named_tensors(path)
    sender = TensorBroadcaster(tensors)
    waits, loop, wait = asyncio.Event(), asyncio.get_running_loop(), GroupMember.wait

    def told(self: GroupMember, work: Any, stop: Any) -> None:
        loop.call_soon_threadsafe(waits.set)
        wait(self, work, stop)

    monkeypatch.setattr(GroupMember, "wait", told)
    async with serving(path) as engine:
        specs = [tensor.spec for tensor in tensors]
        await engine.pause(InFlightPolicy.DRAIN)
        receiving = asyncio.create_task(engine.receive_weights(sender.group, specs, version=3))
        with sending(sender, tensors, num_buckets=1):
            await waits.wait()
            receiving.cancel()
            await asyncio.wait({receiving})
        assert receiving.cancelled()
        assert engine.weight_version == 0
    assert sender.keys.get("failed").decode() == "rank 1: its server gave the update up"


@pytest.mark.asyncio
async def test_an_abort_does_not_hide_why_the_engine_could_not_write(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_dir("qwen2", seed=0)
    tensors = named_tensors(path)
    sender = TensorBroadcaster(tensors)
    ends, loop, goes_on = asyncio.Event(), asyncio.get_running_loop(), threading.Event()
    give_up = CollectiveMember._give_up

    def held(self: CollectiveMember, cause: str, *, at_fault: bool) -> None:
        loop.call_soon_threadsafe(ends.set)
        goes_on.wait()
        give_up(self, cause, at_fault=at_fault)

    def overwrite(name: str, value: torch.Tensor) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(CollectiveMember, "_give_up", held)
    async with serving(path) as engine:
        monkeypatch.setattr(engine._model, "overwrite", overwrite)
        specs = [tensor.spec for tensor in tensors]
        await engine.pause(InFlightPolicy.DRAIN)
        receiving = asyncio.create_task(engine.receive_weights(sender.group, specs, version=3))
        with sending(sender, tensors, num_buckets=1):
            await ends.wait()
            receiving.cancel()
            await asyncio.sleep(0)
            goes_on.set()
            with pytest.raises(MemoryError, match="no room"):
                await receiving


@pytest.mark.asyncio
async def test_what_does_not_fit_is_refused_before_a_group_is_joined(model_dir: ModelDir) -> None:
    path = model_dir("qwen2", seed=0)
    sender = TensorBroadcaster(named_tensors(path)[:-1])
    async with serving(path) as engine:
        specs = [tensor.spec for tensor in named_tensors(path)[:-1]]
        await engine.pause(InFlightPolicy.DRAIN)
        with pytest.raises(TensorMismatch):
            await engine.receive_weights(sender.group, specs, version=3)
