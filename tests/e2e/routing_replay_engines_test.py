"""Experts that vLLM and SGLang report, against transformers' and in the policy.

One server of each engine, each started once.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from treadle.conformance.client.checkpoint import read_checkpoint
from treadle.conformance.client.remote_engine import connect_engine
from treadle.conformance.contracts.reader import (
    Output,
    pause_midway,
    random_prompt,
    request,
    run,
    run_all,
    update,
)
from treadle.conformance.contracts.remote_contract import plain_channel
from treadle.rollout_server.engine import EngineRequest, FinishReason, InFlightPolicy
from treadle.rollout_server.engines.torch.testing.text_model import assert_chosen
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.rollout_server.testing.process import running_server

from .replaying import check_replay, write_sparse_model

pytestmark = pytest.mark.timeout(1200)
VOCAB = 256


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a model; SGLang takes such as are published."""
    return write_sparse_model(tmp_path_factory.mktemp("model"), as_published=engine == "sglang")


@pytest.fixture(scope="module")
def address(engine: str, folder: Path) -> Iterator[str]:
    settings = {
        "engine": engine,
        "model.path": str(folder),
        "model.context_length": "256",
        "model.num_threads": "1",
        "model.max_num_seqs": "8",
        "model.max_num_batched_tokens": "64",  # Longer prompts are read in parts.
        "model.kv_cache_bytes": "700000",  # 450 tokens, so that a batch has some computed again.
    }
    flags = [word for key, value in settings.items() for word in (f"--{key}", value)]
    if engine == "vllm":  # Its smallest blocks, so that short prompts are found in the cache.
        flags += ["--engine_args", '{"block_size": 32}']
    with running_server(*flags, command=engine_command(engine)) as server:
        yield server.address


def assert_experts(folder: Path, wanted: EngineRequest, output: Output) -> None:
    """Asserts that the experts are those that transformers chooses for the same ids."""
    first = wanted.routed_experts_from
    if first is None:
        assert output.routed_experts == b""
    else:
        assert_chosen(folder, [*wanted.prompt, *output.token_ids], first, output.routed_experts)


@pytest.mark.asyncio
async def test_they_are_those_of_transformers(folder: Path, address: str) -> None:
    """Alone and in a batch, of cached rows and of others, for all who ask and for nobody else."""
    long = random_prompt(100, VOCAB, seed=1)
    alone = [request(long, temperature=1.0, seed=3, routed_experts_from=n) for n in (0, 0, 100)]
    mixed = [
        request(
            random_prompt(20 + 30 * n, VOCAB, seed=n),
            max_tokens=20 + 5 * n,
            routed_experts_from=7 * n if n % 2 else None,
        )
        for n in range(6)
    ]
    async with plain_channel(address) as channel, connect_engine(channel) as engine:
        assert engine.info.capabilities.routed_experts
        outputs = [await run(engine, wanted) for wanted in alone]
        assert outputs[0].cached_prompt_tokens < outputs[1].cached_prompt_tokens
        outputs += await run_all(engine, mixed)
    for wanted, output in zip(alone + mixed, outputs, strict=True):
        assert_experts(folder, wanted, output)


@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [InFlightPolicy.CONTINUE, InFlightPolicy.INTERRUPT])
async def test_a_pause_loses_none(folder: Path, address: str, policy: InFlightPolicy) -> None:
    wanted = request(
        random_prompt(50, VOCAB, seed=9), max_tokens=200, routed_experts_from=10, logprobs=False
    )
    async with plain_channel(address) as channel, connect_engine(channel) as engine:
        reader = await pause_midway(engine, wanted)
        await engine.pause(policy)
        await engine.resume()
        output = await reader.output()
    interrupted = policy is InFlightPolicy.INTERRUPT
    assert output.reason is (FinishReason.INTERRUPTED if interrupted else FinishReason.LENGTH)
    assert_experts(folder, wanted, output)


def test_they_keep_the_contract(address: str) -> None:
    kit = (sys.executable, "-m", "treadle.conformance", "--address", address, "--only", "experts")
    done = subprocess.run(kit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.asyncio
async def test_an_update_brings_those_of_the_new_weights(
    folder: Path, address: str, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(folder / "model.safetensors")
    flipped = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
    save_file(flipped, other / "model.safetensors", metadata={"format": "pt"})
    wanted = request(random_prompt(100, VOCAB, seed=1), routed_experts_from=0)
    async with plain_channel(address) as channel, connect_engine(channel) as engine:
        for version, path in enumerate((other, folder), 1):
            await update(engine, read_checkpoint(path), version)
            assert_experts(path, wanted, await run(engine, wanted))


@pytest.mark.asyncio
async def test_the_policy_computes_with_the_experts_of_the_engine(
    folder: Path, address: str
) -> None:
    await check_replay(folder, address)
