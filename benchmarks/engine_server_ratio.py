"""Tokens per second through the server, compared with the same engine without a server.

64 concurrent completions of 200 tokens, with log-probabilities. One side is a server in the
engine's environment, which this process calls over gRPC; the other is a process in that environment
that calls the engine directly (`engine_in_process.py`). Both get the engine options of the same
command line and the same prompts. They take turns, so a noisy machine affects both. The output is
the median and range over the rounds, and those of the ratio per round.

    python benchmarks/engine_server_ratio.py --engine torch [--rounds 5] [--model DIRECTORY]
        [--server_command "/opt/vllm/bin/python -m treadle.rollout_server"] [-- SERVER OPTIONS]

The default model has the size of the calculator demo's and random weights: the faster the model,
the larger the relative cost of a server.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import uvloop
from engine_in_process import Batch

from treadle.conformance.client.stubs import stubs_for
from treadle.rollout.v1 import generation_service_pb2 as pb
from treadle.rollout_server.testing.process import HERE, running_server

_DRIVER = Path(__file__).with_name("engine_in_process.py")


class _Rates(NamedTuple):
    """One number per round for each side."""

    in_process: list[float]
    server: list[float]


class InProcess:
    """The engine in a separate process; `run` runs a batch there."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.pid = process.pid
        self.vocab_size = int(self._answer()["vocab_size"])

    def run(self, batch: Batch) -> float:
        """Returns tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(batch)) + "\n")
        self._process.stdin.flush()
        return self._answer()["tokens_per_s"]

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{_DRIVER.name} ended with {self._process.wait()}, see above")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextlib.contextmanager
def in_process(python: str, options: Sequence[str]) -> Iterator[InProcess]:
    """Starts the engine; ends it with all its processes."""
    with subprocess.Popen(
        [python, str(_DRIVER), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield InProcess(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


async def through_server(address: str, batch: Batch) -> float:
    """Returns tokens per second."""
    async with grpc.aio.insecure_channel(address) as channel:
        generation = stubs_for(channel).generation

        async def complete(index: int) -> int:
            request = pb.GenerateRequest(
                request_id=f"{batch.seed}/{index}",
                prompt_token_ids=batch.prompt(index),
                sampling=pb.SamplingParams(max_tokens=batch.max_tokens, ignore_eos=True),
                logprob_mode=pb.LOGPROB_MODE_SAMPLED,
                batched=True,
            )
            tokens = 0
            async for message in generation.Generate(request, timeout=3600):
                event: Any = message.batch if message.HasField("batch") else message
                chunks = event.tokens if event is not message else [event.tokens]
                tokens += sum(len(chunk.token_ids) for chunk in chunks)
            return tokens

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*[complete(index) for index in range(batch.size)]))
        return tokens / (time.perf_counter() - began)


def group_cpu_s(group: int) -> float:
    """Returns the CPU time of a process group, including children that ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_bytes().rpartition(b")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace, command: Sequence[str], model: Path) -> dict[str, _Rates]:
    """Runs all rounds, after a warm-up."""
    options = ["--engine", args.engine, "--model.path", str(model)]
    options += ["--model.max_num_seqs", str(args.concurrency), *args.options]
    per_s = _Rates([], [])
    per_cpu_s = _Rates([], [])
    with (
        in_process(args.python or command[0], options) as engine,
        running_server(*options, command=command) as server,
    ):
        sides = (
            (engine.pid, engine.run),
            (server.popen.pid, lambda batch: uvloop.run(through_server(server.address, batch))),
        )
        for number in range(-1, args.rounds):
            batch = Batch(
                seed=number + 1,
                size=args.concurrency,
                prompt_tokens=args.prompt_tokens,
                max_tokens=args.tokens,
                vocab_size=engine.vocab_size,
            )
            for place, (group, run) in enumerate(sides):
                began_s = group_cpu_s(group)
                rate = run(batch)
                cpu_s = group_cpu_s(group) - began_s
                if number >= 0:
                    per_s[place].append(rate)
                    per_cpu_s[place].append(batch.size * batch.max_tokens / cpu_s)
    return {"tokens a second": per_s, "tokens a second of its processors": per_cpu_s}


def show(name: str, values: Sequence[float], form: str) -> None:
    """Prints the median and range."""
    middle, low, high = (format(pick(values), form) for pick in (statistics.median, min, max))
    print(f"    {name:12} {middle:>8}  ({low} to {high})")


def main() -> None:
    """Prints the table; writes the rounds with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--model", type=Path, help="Hugging Face directory")
    parser.add_argument("--server_command", default=shlex.join(HERE))
    parser.add_argument(
        "--python", help="of the engine's environment; default: the command's first"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompt_tokens", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--json", type=Path, help="also write the rounds here")
    parser.add_argument("options", nargs="*", help="of the server and its engine, after --")
    args = parser.parse_args()
    command = shlex.split(args.server_command)
    with tempfile.TemporaryDirectory() as directory:
        model = args.model
        if model is None:
            from engine_throughput import write_model

            model = Path(directory)
            write_model(model, "tiny")
        measured = measure(args, command, model)
    print(f"{args.engine}: {args.concurrency} at once, {args.tokens} tokens each")
    for title, rates in measured.items():
        print(f"  {title}")
        show("in process", rates.in_process, ",.0f")
        show("server", rates.server, ",.0f")
        ratios = [s / p for s, p in zip(rates.server, rates.in_process, strict=True)]
        show("ratio", ratios, ".3f")
    if args.json is not None:
        args.json.write_text(json.dumps({k: v._asdict() for k, v in measured.items()}, indent=1))


if __name__ == "__main__":
    main()
