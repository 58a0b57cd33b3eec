"""`treadle serve` beside what it is a client of: the policy's ranks and a rollout server.

Three figures on the demo's model, the first two of alternating rounds:

- *step*: seconds of `forward_backward` and `optim_step` through the API, over those of the same
  batch by the policy's client, which the driver uses, with its own ranks. The service writes the
  new state to the disk in this time; a second ratio is to a peer that does so too.
- *sample*: tokens per second of `asample` through the API with 64 samples in flight all the time,
  in requests of one sample and of 8, over those of `Generate` at a rollout server of its own with
  as many in flight. The client of both takes almost nothing (`bare_http.py`); its CPU and the
  service's are printed. With `--sdk ENVIRONMENT`, what the official client reaches and takes: a
  directory of a virtual environment with `tinker`, which is made if there is none.
- *memory*: of the service's process, after waves of 1,000 requests that were in flight together.

    python benchmarks/serve_overhead.py [--figures step sample memory] [--rounds 7] [--waves 4]
        [--sdk ENVIRONMENT]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bare_http import BareHttp
from peer_process import PeerProcess, python_of

from treadle.agent_loop import RequestContext, SamplingParams
from treadle.agent_loop.rpc import GrpcTokenGenerator, connect
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
_SEQUENCES, _LENGTH = 32, 256
_TOKENS, _IN_FLIGHT, _SAMPLES, _GROUP, _WAVE = 32, 64, 384, 8, 1000
_PROMPT = list(range(5, 69))
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


class _Used(NamedTuple):
    """What a round reached: tokens per second, and milliseconds of CPU for a sample."""

    tokens_s: float
    service_ms: float
    client_ms: float


class _Sampling:
    """The rounds in which `_SAMPLES` are sampled, `_IN_FLIGHT` at a time.

    Args:
        process: Number of the service's process.
    """

    def __init__(self, service: RemoteService, process: int) -> None:
        self._web = _web(service)
        self._sampler = service.sampler()
        self._process = process
        self._names = itertools.count()

    async def _all(self, ask: Callable[[int], Awaitable[None]], group: int) -> None:
        requests = iter(range(_SAMPLES // group))

        async def one_by_one() -> None:
            for _ in requests:
                await ask(next(self._names))

        await asyncio.gather(*(one_by_one() for _ in range(_IN_FLIGHT // group)))

    async def _measured(self, work: Awaitable[float | None]) -> _Used:
        """Returns what the work used; it returns the client's CPU seconds, or it is the client."""
        before, own, began = _cpu_s(self._process), time.process_time(), time.perf_counter()
        client_s = await work
        took = time.perf_counter() - began
        if client_s is None:
            client_s = time.process_time() - own
        used = _cpu_s(self._process) - before
        return _Used(_SAMPLES * _TOKENS / took, used / _SAMPLES * 1e3, client_s / _SAMPLES * 1e3)

    async def direct(self, generator: GrpcTokenGenerator) -> _Used:
        """By a rollout server's client."""
        params = SamplingParams(max_tokens=_TOKENS, temperature=1.0, ignore_eos=True)

        async def ask(number: int) -> None:
            name = str(number)
            about = RequestContext(request_id=name, session_id=name, deadline=math.inf)
            await generator.generate(_PROMPT, params, request=about)
            generator.finish_session(name)

        return await self._measured(self._all(ask, 1))

    async def through(self, group: int) -> _Used:
        """Through the API."""

        async def ask(number: int) -> None:
            await _ask(self._web, self._sampler, number, _TOKENS, group)

        return await self._measured(self._all(ask, group))

    async def by_sdk(self, peer: PeerProcess, group: int) -> _Used:
        """Through the API, by the official client in its process."""

        async def ask() -> float:
            return float((await peer.ask(f"{_SAMPLES} {group}"))["cpu_s"])

        return await self._measured(ask())


async def samples(
    service: RemoteService, process: int, rounds: int, sdk: Path | None, logs: Path
) -> None:
    """Measures what is sampled."""
    path = resolve_model(_MODEL)
    own = ("--engine", "torch", "--model.path", str(path), "--model.num_threads", "1")
    sampling = _Sampling(service, process)
    found: defaultdict[str, list[_Used]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(running_server(*own))
        generator = await stack.enter_async_context(connect([server.address]))
        peer = None
        if sdk is not None:
            peer = await _official_client(service, sdk, logs)
            stack.push_async_callback(peer.end)
        for _ in range(rounds + 1):
            found["rollout server"].append(await sampling.direct(generator))
            for group in (1, _GROUP):
                found[f"API, {group} a request"].append(await sampling.through(group))
                if peer is not None:
                    used = await sampling.by_sdk(peer, group)
                    found[f"SDK, {group} a request"].append(used)
    for name, every in found.items():
        pairs = list(zip(every, found["rollout server"], strict=True))[1:]
        print(
            f"sample: {name}: {_median([used.tokens_s for used, _ in pairs]):.0f} tokens/s, ratio "
            f"{_spread([used.tokens_s / direct.tokens_s for used, direct in pairs])}; CPU of a "
            f"sample: service {_median([used.service_ms for used, _ in pairs]):.2f} ms, client "
            f"{_median([used.client_ms for used, _ in pairs]):.2f} ms",
            flush=True,
        )


async def _official_client(service: RemoteService, sdk: Path, logs: Path) -> PeerProcess:
    python = python_of(sdk, ["tinker"])
    settings = {
        "address": service.address,
        "key": _KEY,
        "model": _MODEL,
        "prompt": _PROMPT,
        "tokens": _TOKENS,
        "in_flight": _IN_FLIGHT,
    }
    return await PeerProcess.start(
        "tinker", python, "tinker_subject.py", settings, logs / "tinker.log"
    )


def _web(service: RemoteService) -> BareHttp:
    return BareHttp(service.address, {"X-API-Key": _KEY})


async def _ask(web: BareHttp, sampler: str, seq: int, tokens: int, count: int = 1) -> None:
    given: dict[str, Any] = {
        "num_samples": count,
        "sampling_session_id": sampler,
        "seq_id": seq,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
        "sampling_params": {"max_tokens": tokens, "temperature": 1.0, "stop": []},
    }
    answer = await web.post("/api/v1/asample", given)
    promise = {"request_id": answer["request_id"]}
    while True:
        found = await web.post("/api/v1/retrieve_future", promise)
        if isinstance(found, bytes):
            return
        assert found.get("type") == "try_again", found


async def memory(service: RemoteService, process: int, waves: int) -> None:
    """Measures the process."""
    sampler = service.sampler()
    found = []
    web = _web(service)
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


async def _main(options: argparse.Namespace) -> None:
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with serving(directory / "state") as (service, process):
            if "step" in options.figures:
                async with policy(directory / "ranks") as group:
                    await steps(service, group, directory, options.rounds)
            if "sample" in options.figures:
                await samples(service, process, options.rounds, options.sdk, directory)
            if "memory" in options.figures:
                await memory(service, process, options.waves)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures what treadle serve adds.")
    figures = ("step", "sample", "memory")
    parser.add_argument("--figures", nargs="+", choices=figures, default=figures)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--waves", type=int, default=4)
    parser.add_argument("--sdk", type=Path, metavar="ENVIRONMENT")
    asyncio.run(_main(parser.parse_args()))
