"""What the engine contract does not cover for vLLM: chunked prefill, its processes, its start.

The last test kills the server's processes, so it comes last.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.conformance.client.remote_engine import connect_engine
from treadle.conformance.contracts.reader import random_prompt, request, run, run_all
from treadle.conformance.contracts.remote_contract import plain_channel
from treadle.rollout_server.engine import EngineRequest
from treadle.rollout_server.testing.descendants import Descendants, shm_files
from treadle.rollout_server.testing.engine_command import engine_command
from treadle.rollout_server.testing.process import ServerProcess, running_server

STEP_TOKENS = 64


@pytest.fixture(scope="module")
def server(tiny_models: tuple[Path, Path]) -> Iterator[ServerProcess]:
    """Reads at most 64 ids in a step, and has room for a few long sequences only."""
    arguments = (
        *("--engine", "vllm", "--model.path", str(tiny_models[0]), "--model.num_threads", "1"),
        *("--model.max_num_seqs", "8", "--model.max_num_batched_tokens", str(STEP_TOKENS)),
        *("--engine_args", json.dumps({"block_size": 32, "num_gpu_blocks_override": 40})),
    )
    with running_server(*arguments, command=engine_command("vllm")) as server:
        yield server


def seeded(length: int, seed: int, *, max_tokens: int = 24) -> EngineRequest:
    prompt = random_prompt(length, 256, seed=seed)
    return request(prompt, temperature=1.0, seed=seed, max_tokens=max_tokens)


@pytest.mark.asyncio
async def test_seeds_hold_for_prompts_read_in_parts_in_any_company(server: ServerProcess) -> None:
    """Five steps for a prompt; 40 blocks of 32 ids hold three of the eight, so some are preempted.

    vLLM's own generators end its engine here, on the CPU.
    """
    wanted = [seeded(40 + 70 * (place % 4), place, max_tokens=120) for place in range(8)]
    async with plain_channel(server.address) as channel, connect_engine(channel) as engine:
        together = await run_all(engine, wanted)
        alone = [await run(engine, one) for one in wanted[4:]]
        counters = engine.counters
    assert [one.token_ids for one in together[4:]] == [one.token_ids for one in alone]
    for one, other in zip(together[4:], alone, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert (counters.running, counters.aborted) == (0, 0)


@pytest.mark.asyncio
async def test_a_retry_with_a_long_prompt_goes_on_where_it_stopped(server: ServerProcess) -> None:
    wanted = seeded(200, 3)
    async with plain_channel(server.address) as channel, connect_engine(channel) as engine:
        whole = await run(engine, wanted)
        prompt = (*wanted.prompt, *whole.token_ids[:9])
        rest = await run(engine, request(prompt, temperature=1.0, seed=3, max_tokens=15))
    assert rest.cached_prompt_tokens >= 192
    assert rest.token_ids == whole.token_ids[9:]


def test_an_argument_that_vllm_does_not_have_is_named(tiny_models: tuple[Path, Path]) -> None:
    unknown = ("--engine_args", '{"blok_size": 32}')
    output = failing_start("--model.path", str(tiny_models[0]), *unknown)
    assert "engine_args.blok_size is not an argument" in output
    assert "did you mean block_size" in output
    assert "Traceback" not in output


def test_a_model_that_vllm_does_not_know_is_named(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    config = json.loads((tiny_models[0] / "config.json").read_text())
    config |= {"model_type": "nobody", "architectures": ["NobodysForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(tiny_models[0] / "model.safetensors", tmp_path)
    output = failing_start("--model.path", str(tmp_path))
    assert "nobody" in output
    assert "Traceback" not in output


def failing_start(*arguments: str) -> str:
    """Starts a server that cannot serve; what it wrote."""
    done = subprocess.run(
        [*engine_command("vllm"), "--engine", "vllm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    return done.stdout


def test_nothing_outlives_a_server_that_is_killed(server: ServerProcess) -> None:
    left = Descendants(server.popen.pid)
    made = shm_files(server.popen.pid)
    assert left
    os.killpg(server.popen.pid, signal.SIGKILL)  # with the processes that could clean up
    left.wait_gone()
    assert [path for path in made if path.exists()] == []
