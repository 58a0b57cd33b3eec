"""`treadle serve` beside what it is a client of: the policy's ranks and a rollout server.

Three figures on the demo's model, the first two of alternating rounds:

- *step*: seconds of `forward_backward` and `optim_step` through the API, over those of the same
  batch by the policy's client, which the driver uses, with its own ranks. The service writes the
  new state to the disk in this time; a second ratio is to a peer that does so too.
- *sample*: tokens per second of `asample` through the API, in groups of 8 as loops ask for them,
  over those of as many calls of `Generate` at its own rollout server. The milliseconds of CPU
  that the service takes for a group say what of the ratio is its own on a machine that is shared.
- *memory*: of the service's process, after waves of 1,000 requests that were in flight together.

    python benchmarks/serve_overhead.py [--rounds 7] [--waves 4]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from treadle.agent_loop import RequestContext, SamplingParams
from treadle.agent_loop.rpc import connect
from treadle.conformance.tinker.client import KitDatum, RemoteModel, RemoteService
from treadle.policy.client.group import PolicyGroup
from treadle.policy.config.policy import LoraConfig
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import SaveRequest
from treadle.rollout_server.testing.process import running_server
from treadle.serve.batches import make_batch
from treadle.serve.wire import read_passes
from treadle.trainer.config.load import load_config
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.policy_group import policy_group
from treadle.trainer.model_source import resolve_model

_KEY = "tml-of-a-benchmark"
_MODEL = "demo:calculator"
_SEQUENCES, _LENGTH, _TOKENS, _CONCURRENT, _GROUP, _WAVE = 32, 256, 32, 64, 8, 1000
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[tuple[RemoteService, int]]:
    """Runs the service; yields its client, and the number of its process."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "treadle.serve", _MODEL, "--address", "127.0.0.1:0"),
            *("--dir", str(directory), "policy.backend=fsdp"),
            *("rollout.threads=1", "launch.policy_threads=1"),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKER_API_KEY": _KEY},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "TINKER_BASE_URL=" in line:
            address = line.partition("TINKER_BASE_URL=")[2].strip()
        if "TINKER_API_KEY" in line:
            break
    try:
        yield RemoteService(address, _KEY), process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.asynccontextmanager
async def policy(directory: Path) -> AsyncIterator[PolicyGroup]:
    """Starts the ranks that a driver has, with the service's adapters and threads."""
    path = resolve_model(_MODEL)
    given = [f"model.path={path}", "data.train_files=none", "policy.backend=fsdp"]
    config = load_config([], given).config
    lora = LoraConfig.model_validate({"rank": 4, "alpha": 32, "targets": list(_TARGETS)})
    changed = config.policy.model_copy(update={"lora": lora})
    config = config.model_copy(update={"policy": changed})
    async with (
        make_launcher(config, directory) as launcher,
        policy_group(config, launcher, threads=1) as group,
    ):
        yield group


def data() -> list[KitDatum]:
    """Returns the batch."""
    chance = random.Random(0)
    weights = (1.0,) * (_LENGTH - 1)
    return [
        KitDatum(
            tokens=[chance.randrange(1000) for _ in range(_LENGTH)], inputs={"weights": weights}
        )
        for _ in range(_SEQUENCES)
    ]


async def steps(service: RemoteService, group: PolicyGroup, directory: Path, rounds: int) -> None:
    """Measures the step."""
    model, batch = service.model(), data()
    passes = read_passes(model.body(batch, seq=1))
    made = make_batch(passes, vocab_size=1024, context_length=1024)
    adamw = pb.AdamW(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8)
    asked = pb.ForwardBackwardRequest(algorithm=made.algorithm, temperature=1.0, keep_tokens=True)
    found: list[tuple[float, float, float]] = []
    for number in range(rounds + 1):
        began = time.perf_counter()
        await asyncio.to_thread(_step, model, batch)
        through = time.perf_counter() - began
        began = time.perf_counter()
        await group.call(asked, made.sequences)
        await group.call(pb.OptimizerStepRequest(adamw=adamw))
        direct = time.perf_counter() - began
        await group.call(SaveRequest(directory=str((directory / str(number)).absolute())))
        found.append((through, direct, time.perf_counter() - began))
    found = found[1:]
    print(f"step: API {_median([t for t, _, _ in found]):.3f} s")
    for name, place in (("driver's client", 1), ("the same and a save", 2)):
        print(
            f"  {name} {_median([each[place] for each in found]):.3f} s, ratio "
            f"{_spread([each[0] / each[place] for each in found])}"
        )


def _step(model: RemoteModel, batch: Sequence[KitDatum]) -> None:
    model.begin(batch)
    model.step(lr=1e-4)


async def samples(service: RemoteService, process: int, rounds: int) -> None:
    """Measures what is sampled."""
    sampler = service.sampler()
    path = resolve_model(_MODEL)
    own = ("--engine", "torch", "--model.path", str(path), "--model.num_threads", "1")
    ratios, speeds, used = [], [], 0.0
    with running_server(*own) as server:
        async with connect([server.address]) as generator, _web(service) as web:
            for number in range(rounds + 1):
                before = _cpu_s(process)
                through = await _through(web, sampler, number)
                used += _cpu_s(process) - before
                params = SamplingParams(max_tokens=_TOKENS, temperature=1.0, ignore_eos=True)
                began = time.perf_counter()
                await asyncio.gather(
                    *(
                        generator.generate(
                            list(range(5, 69)),
                            params,
                            request=RequestContext(
                                request_id=f"{number}:{n}",
                                session_id=f"{number}:{n}",
                                deadline=math.inf,
                            ),
                        )
                        for n in range(_CONCURRENT)
                    )
                )
                direct = _CONCURRENT * _TOKENS / (time.perf_counter() - began)
                ratios.append(through / direct)
                speeds.append((through, direct))
    print(
        f"sample: API {_median([a for a, _ in speeds[1:]]):.0f}, rollout server "
        f"{_median([b for _, b in speeds[1:]]):.0f} tokens/s, ratio {_spread(ratios[1:])}"
    )
    groups = (rounds + 1) * _CONCURRENT // _GROUP
    print(f"  {used / groups * 1e3:.1f} ms of the service's CPU for {_GROUP} samples of {_TOKENS}")


def _web(service: RemoteService) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=2 * _WAVE, max_keepalive_connections=_CONCURRENT)
    return httpx.AsyncClient(
        base_url=f"{service.address}/api/v1",
        headers={"X-API-Key": _KEY},
        timeout=600.0,
        limits=limits,
    )


async def _through(web: httpx.AsyncClient, sampler: str, number: int) -> float:
    began = time.perf_counter()
    groups = _CONCURRENT // _GROUP
    names = range(number * groups, (number + 1) * groups)
    await asyncio.gather(*(_ask(web, sampler, n, _TOKENS, _GROUP) for n in names))
    return _CONCURRENT * _TOKENS / (time.perf_counter() - began)


async def _ask(web: httpx.AsyncClient, sampler: str, seq: int, tokens: int, count: int = 1) -> None:
    given: dict[str, Any] = {
        "num_samples": count,
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(5, 69))}]},
        "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "stop": []},
    }
    answer = await _post(web, "/asample", given)
    promise = {"request_id": answer.raise_for_status().json()["request_id"]}
    while True:
        found = await _post(web, "/retrieve_future", promise)
        if "json" not in found.raise_for_status().headers["content-type"]:
            return
        assert found.json().get("type") == "try_again", found.text


async def _post(web: httpx.AsyncClient, path: str, given: dict[str, Any]) -> httpx.Response:
    """Sends a request, again where its connection was closed: it is applied once."""
    while True:
        with contextlib.suppress(httpx.TransportError):
            return await web.post(path, json=given)


async def memory(service: RemoteService, process: int, waves: int) -> None:
    """Measures the process."""
    sampler = service.sampler()
    found = []
    async with _web(service) as web:
        for wave in range(waves):
            began = time.perf_counter()
            names = range(wave * _WAVE, (wave + 1) * _WAVE)
            await asyncio.gather(*(_ask(web, sampler, n, 4) for n in names))
            found.append(_resident_mib(process))
            print(f"  wave {wave + 1}: {time.perf_counter() - began:.1f} s, {found[-1]} MiB")
    print(f"memory: {found[0]} to {found[-1]} MiB over {waves} waves of {_WAVE} requests")


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = (each for each in status.splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) // 1024


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float]) -> str:
    return f"{_median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


async def _main(rounds: int, waves: int) -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with serving(directory / "state") as (service, process):
            async with policy(directory / "ranks") as group:
                await steps(service, group, directory, rounds)
            await samples(service, process, rounds)
            await memory(service, process, waves)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures what treadle serve adds.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--waves", type=int, default=4)
    options = parser.parse_args()
    asyncio.run(_main(options.rounds, options.waves))
