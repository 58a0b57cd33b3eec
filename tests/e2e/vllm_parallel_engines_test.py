"""vLLM with two workers that share the model, or have a copy each: both sample the same weights.

A server of each layout; its last test ends it, so it comes last.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.tiny_model import write_tiny_model

from treadle.conformance.client.checkpoint import read_checkpoint
from treadle.conformance.client.remote_engine import RemoteEngine, connect_engine
from treadle.conformance.contracts.reader import random_prompt, request, run_all, update
from treadle.conformance.contracts.reference import reference
from treadle.conformance.contracts.remote_contract import plain_channel
from treadle.policy.config.weight_sync import WeightSyncConfig
from treadle.policy.weight_sync.client import WeightSyncClient
from treadle.policy.weight_sync.publisher import WeightPublisher
from treadle.rollout_server.engine import InFlightPolicy, MemoryKind
from treadle.rollout_server.testing.descendants import Descendants, shm_files
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.rollout_server.testing.process import ServerProcess, running_server

from .policies import DrivenPolicy

pytestmark = pytest.mark.timeout(1200)
_ENDS = {"tensor_model_parallel_size": signal.SIGKILL, "data_parallel_size": signal.SIGTERM}
"""What makes two workers, and what ends them."""
_REQUESTS = [
    request(random_prompt(40, 256, seed=seed), temperature=1.0, seed=seed, max_tokens=24)
    for seed in range(8)
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights."""
    first, second = (tmp_path_factory.mktemp(f"weights-{seed}") for seed in (0, 1))
    return write_tiny_model(first, seed=0), write_tiny_model(second, seed=1)


@pytest.fixture(scope="module", params=_ENDS)
def layout(request: pytest.FixtureRequest) -> str:
    """The key of which there are two."""
    key: str = request.param
    return key


@pytest.fixture(scope="module")
def server(layout: str, models: tuple[Path, Path]) -> Iterator[ServerProcess]:
    """Starts with the first set."""
    with running_server(
        *("--engine", "vllm", "--model.path", str(models[0]), "--model.num_threads", "1"),
        *("--model.dtype", "float32", "--model.max_num_seqs", "8", f"--model.{layout}", "2"),
        command=engine_command("vllm"),
    ) as server:
        yield server


async def assert_samples_from(model: Path, engine: RemoteEngine, *, version: int) -> None:
    """More requests at once than one worker is given, where each has a copy."""
    outputs = await run_all(engine, _REQUESTS)
    assert {label for output in outputs for label in output.versions} == {version}
    for wanted, output in zip(_REQUESTS, outputs, strict=True):
        told = reference(model).logprobs(wanted.prompt, output.token_ids, wanted.sampling)
        assert output.logprobs == pytest.approx(told, abs=1e-4)


@pytest.mark.asyncio
async def test_updates_reach_both_workers(
    server: ServerProcess, models: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = models
    policy = DrivenPolicy(second)
    config = WeightSyncConfig.model_validate(
        {"transport": {"kind": "collective", "bucket_bytes": 1 << 16, "timeout_s": 250}}
    )
    publisher = WeightPublisher(policy, config, element_type="float32", directory=tmp_path)  # type: ignore[arg-type]
    client = WeightSyncClient("both", server.address, control_deadline_s=250, commit_deadline_s=250)
    async with plain_channel(server.address) as channel, connect_engine(channel) as engine:
        assert engine.info.num_workers == 2
        await assert_samples_from(first, engine, version=0)
        for version in (1, 2):
            assert (await publisher.publish(version, [client])).served == ("both",)
        await assert_samples_from(second, engine, version=2)
        await update(engine, read_checkpoint(first), version=3)
        await assert_samples_from(first, engine, version=3)
    await client.aclose()
    policy.close()


@pytest.mark.asyncio
async def test_both_go_on_as_they_were_after_their_memory_was_lent(
    server: ServerProcess, models: tuple[Path, Path]
) -> None:
    async with plain_channel(server.address) as channel, connect_engine(channel) as engine:
        await engine.pause(InFlightPolicy.DRAIN)
        await engine.release_memory(frozenset(MemoryKind))
        await engine.restore_memory(frozenset(MemoryKind))
        await engine.resume()
        await assert_samples_from(models[0], engine, version=engine.weight_version)


@pytest.mark.asyncio
async def test_neither_outlives_the_server(server: ServerProcess, layout: str) -> None:
    left = Descendants(server.popen.pid)
    made = shm_files(server.popen.pid)
    assert len(left) >= 2
    server.popen.send_signal(_ENDS[layout])
    await asyncio.to_thread(server.popen.wait)
    await asyncio.to_thread(left.wait_gone)
    assert [path for path in made if path.exists()] == []
