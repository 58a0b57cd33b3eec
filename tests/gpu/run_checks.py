"""Checks of whole runs: the calculator demo for some steps, with policy and servers on the device.

`rollout/logprob_diff_mean` compares the servers' log-probabilities with the policy's. If it stays
small after updates, the servers hold the policy's weights.
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.check import Context, Figures, expect

from e2e.testing import Trainer

_STEPS = {"cuda": 6, "cpu": 2}
_SMALL = (
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.threads=1",
    "launch.policy_threads=1",
)
_BFLOAT16 = ("policy.dtype=bfloat16", "rollout.dtype=bfloat16")
_SHARED_MEMORY = ("sync.transport=shared_memory", "sync.in_place=true")
_IN_TURN = (
    *("rollout.release_memory=true", "rollout.multi_stage_wake_up=true"),
    *(f"policy.offload.{part}=true" for part in ("parameters", "optimizer", "reference")),
    "algorithm.kl_coef=0.01",
)
_MOST_NATS = 0.05
_SHOWN = {
    "time/rollout_s": "rollout, s",
    "time/train_s": "training, s",
    "time/sync_s": "sync, s",
    "weights/bytes": "weights, bytes",
    "offload/freed_bytes": "freed, bytes",
    "offload/host_bytes": "kept in host memory, bytes",
    "offload/release_s": "released, s",
    "offload/restore_s": "restored, s",
}


def check_together(context: Context, engine: str) -> Figures:
    """Policy and server share the device at the same time."""
    return _run(context, *_BFLOAT16, *_SHARED_MEMORY, *_engine(context, engine))


def check_in_turn(context: Context, engine: str) -> Figures:
    """Policy and server have the device in turn, with everything that can leave it off it."""
    return _run(context, *_BFLOAT16, *_SHARED_MEMORY, *_IN_TURN, *_engine(context, engine))


def check_collective(context: Context) -> Figures:
    """The policy broadcasts its weights to a server on another device."""
    kind = "sync.transport.kind=collective"
    if not context.on_gpu:
        return _run(context, *_BFLOAT16, kind)
    apart = ("launch.gpus_per_node=2", "launch.placement=separate", "policy.parallel.data=1")
    return _run(context, *_BFLOAT16, kind, "sync.transport.backend=nccl", *apart)


def check_tensor_parallel(context: Context) -> Figures:
    """Two ranks share the model, in turn with a server on each device."""
    parallel = ("policy.parallel.tensor=2", *_BFLOAT16, *_SHARED_MEMORY)
    if not context.on_gpu:
        return _run(context, *parallel)
    return _run(context, *parallel, "launch.gpus_per_node=2", "rollout.num_replicas=2")


def check_engine_tensor_parallel(context: Context, engine: str) -> Figures:
    """A server with the model on two devices, in turn with the ranks that are on them."""
    return _run(
        context,
        *_SHARED_MEMORY,
        *("launch.gpus_per_node=2", "rollout.tensor_model_parallel_size=2"),
        *_engine(context, engine),
    )


def check_four_devices(context: Context, engine: str) -> Figures:
    """Two ranks broadcast to a server of two devices."""
    return _run(
        context,
        *("launch.gpus_per_node=4", "launch.placement=separate", "policy.parallel.data=1"),
        *("policy.parallel.tensor=2", "rollout.tensor_model_parallel_size=2"),
        *("sync.transport.kind=collective", "sync.transport.backend=nccl"),
        *_engine(context, engine),
    )


def check_all_devices(context: Context) -> Figures:
    """All GPUs from one line, with what follows from their number."""
    return _run(context, f"launch.gpus_per_node={context.num_gpus}", *_SHARED_MEMORY)


def _engine(context: Context, engine: str) -> Sequence[str]:
    if engine == "torch":
        return ()
    command = context.engines[engine]
    if (path := os.environ.get("PYTHONPATH")) is not None:  # the trainer passes none to a command
        command = ("env", f"PYTHONPATH={path}", *command)
    settings = [f"rollout.name={engine}", f"rollout.server_command={json.dumps(command)}"]
    if context.on_gpu:
        settings.append("rollout.gpu_memory_utilization=0.4")
    return settings


def _run(context: Context, *settings: str) -> Figures:
    """Trains to the end; returns what the steps after the first took."""
    steps = _STEPS[context.device]
    common = (
        f"schedule.total_steps={steps}",
        "schedule.val_every=null",
        "schedule.val_before_train=false",
        "schedule.save_every=null",
    )
    trainer = Trainer(
        context.folder / "run", [*common, *(() if context.on_gpu else _SMALL), *settings]
    )
    status = trainer.wait()
    sys.stdout.write(trainer.output)
    expect(status == 0, f"the run ended with status {status}:\n{trainer.output[-2000:]}")
    lines = [line for line in trainer.metrics() if line["step"]]  # 0: before the first update
    expect(len(lines) == steps, f"{len(lines)} steps were made, {steps} were asked for")
    versions = [line["weights/version"] for line in lines]
    expect(versions == list(range(1, steps + 1)), f"the versions after the steps are {versions}")
    differences = [float(line["rollout/logprob_diff_mean"]) for line in lines]
    expect(
        all(math.isfinite(d) and d < _MOST_NATS for d in differences),
        f"servers and policy differ by {differences} nats per token: below {_MOST_NATS} are "
        "expected at each step, after updates as before",
    )
    return _figures(lines, differences)


def _figures(lines: Sequence[Mapping[str, Any]], differences: Sequence[float]) -> Figures:
    later = lines[1:]  # the first step compiles, and makes groups
    figures: Figures = {
        "largest mean difference, nats": max(differences),
        "KL, nats": float(lines[-1]["rollout/kl"]),
    }
    for metric, name in _SHOWN.items():
        values = [float(line[metric]) for line in later if metric in line]
        if values:
            figures[name] = statistics.median(values)
    return figures
