"""Throughput, by the scripts of `benchmarks/`: each prints its own report into the log."""

import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.check import CheckSkipped, Context, Figures, expect

from treadle.rollout_server.testing.process import HERE


def measure_torch_engine(context: Context) -> Figures:
    """Tokens per second of the torch engine and of transformers' `generate`."""
    size = ["--sequences", "64" if context.on_gpu else "8", "--rounds", _rounds(context, 5)]
    size += ["--model", "0.5b"] if context.on_gpu else []
    device = ["--device", context.device, "--dtype", "bfloat16" if context.on_gpu else "float32"]
    rates = _benchmark(context, "engine_throughput", *size, *device)["tokens_per_s"]
    return {f"{side}, tokens/s": statistics.median(rates[side]) for side in sorted(rates)}


def measure_training(context: Context) -> Figures:
    """Tokens per second of a training step, by the policy and by transformers."""
    # transformers' logits of all 16 padded sequences fill a third of 80 GB.
    size = ["--model", "0.5b", "--num_sequences", "16", "--longest", "1024", "--spread", "0.75"]
    if not context.on_gpu:
        size = ["--num_sequences", "4", "--longest", "60"]
    dtype = ["--dtype", "bfloat16" if context.on_gpu else "float32"]
    rates = _benchmark(context, "train_step", *size, *dtype, "--rounds", _rounds(context, 5))
    return {
        f"{side}, tokens/s": statistics.median(values)
        for side, values in rates["tokens_per_s"].items()
    }


def measure_server(context: Context, engine: str) -> Figures:
    """Tokens per second through a server, and of its engine alone."""
    options = ["--model.dtype", "bfloat16" if context.on_gpu else "float32"]
    if engine == "torch":
        options += ["--model.device", context.device]
    elif context.on_gpu:
        # The server and the engine without one are there at the same time.
        options += ["--model.gpu_memory_utilization", "0.3"]
    size = ["--rounds", _rounds(context, 3)]
    size += [] if context.on_gpu else ["--concurrency", "4", "--tokens", "16"]
    if context.model is not None:
        size += ["--model", str(context.model)]
    command = context.engines.get(engine, HERE)
    size += ["--python", _python(command), "--server_command", shlex.join(command)]
    found = _benchmark(context, "engine_server_ratio", "--engine", engine, *size, "--", *options)[
        "tokens a second"
    ]
    return {
        "through the server, tokens/s": statistics.median(found["server"]),
        "the engine alone, tokens/s": statistics.median(found["in_process"]),
    }


def _python(command: Sequence[str]) -> str:
    """Returns the interpreter of a server's command, which runs the engine without a server."""
    if "-m" in command:
        return command[command.index("-m") - 1]
    beside = Path(command[0]).with_name("python")
    if len(command) > 1 or not beside.exists():
        raise CheckSkipped(
            f"{shlex.join(command)} does not say which interpreter it runs: name the server as "
            "'PYTHON -m treadle.rollout_server' to compare it with its engine alone"
        )
    return str(beside)


def _rounds(context: Context, count: int) -> str:
    return str(count if context.on_gpu else 1)


def _benchmark(context: Context, name: str, *arguments: str) -> Mapping[str, Any]:
    """Runs a script with its `--json`; returns what it wrote."""
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, (
        f"benchmarks/{name}.py is not on the path"
    )
    out = context.folder / f"{name}.json"
    options = ["--json", str(out)]
    status = subprocess.run(
        [sys.executable, found.origin, *options, *arguments], env=os.environ, check=False
    ).returncode
    expect(status == 0, f"benchmarks/{name}.py ended with status {status}: see its log")
    said: Mapping[str, Any] = json.loads(out.read_text())
    return said
