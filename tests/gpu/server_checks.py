"""Checks of the servers: the conformance kit against each engine on the device.

The kit compares tokens and log-probabilities with transformers, replaces the weights several times
by every transport that the server offers, and releases memory and takes it back.
"""

import json
import subprocess
import sys
from pathlib import Path

from engines.smollm2 import SmolUnavailable, smollm2
from engines.tiny_model import write_tiny_model
from gpu.check import Context, Figures, expect

from treadle.rollout_server.testing.process import HERE, running_server

# Kernels of a GPU sum in another order than transformers on the CPU.
_NATS = {("cpu", "float32"): 2e-4, ("cuda", "float32"): 2e-3}
_BFLOAT16_NATS = 0.15


def check_conformance(context: Context, engine: str, dtype: str) -> Figures:
    """Runs the kit against a server of an engine."""
    model = context.model or _model(context)
    command = context.engines.get(engine, HERE)
    arguments = [
        *("--engine", engine, "--model.path", str(model), "--model.dtype", dtype),
        *("--model.max_num_seqs", "8", "--model.context_length", "1024"),
    ]
    if engine == "torch":
        arguments += ["--model.device", context.device]
    if context.on_gpu and engine != "torch":
        arguments += ["--model.gpu_memory_utilization", "0.4"]
    if not context.on_gpu:
        arguments += ["--model.num_threads", "1"]
    found = context.folder / "found.json"
    with running_server(*arguments, command=command) as server:
        kit = [sys.executable, "-m", "treadle.conformance", "--address", server.address]
        kit += ["--model", str(model), "--places", "8", "--long", "600", "--json", str(found)]
        kit += ["--tolerance", str(_NATS.get((context.device, dtype), _BFLOAT16_NATS))]
        if not context.on_gpu:
            kit += ["--only", "greedy or logprobs are or released"]
        done = subprocess.run(kit, capture_output=True, text=True, check=False)
    expect(done.returncode in (0, 1), f"the kit gave no result:\n{done.stderr[-2000:]}")
    said = json.loads(found.read_text())
    bad = [f"{c['check']}: {c['seen']}" for c in said["checks"] if c["outcome"] == "does not"]
    expect(not bad, "\n".join(bad))
    return {
        "engine": f"{said['engine']} {said['engine_version']}",
        "checks that hold": said["holds"],
        "skipped": said["skipped"],
    }


def _model(context: Context) -> Path:
    """Returns SmolLM2 for a GPU, if it is to be had; else a random model with half a million."""
    if context.on_gpu:
        try:
            return smollm2()
        except SmolUnavailable as error:
            sys.stdout.write(f"a tiny model takes the place of SmolLM2: {error}\n")
    return write_tiny_model(context.folder / "model", seed=0)
