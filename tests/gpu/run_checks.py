"""Checks of whole runs: the calculator demo for some steps, with policy and servers on the device.

`rollout/logprob_diff_mean` compares the servers' log-probabilities with the policy's. If it stays
small after updates, the servers hold the policy's weights.
"""

import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
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


def check_run(context: Context, kind: str, engine: str = "torch") -> Figures:
    """Trains with the settings of a kind of run; see `settings`."""
    return _run(context, *settings(context, kind, engine))


def settings(context: Context, kind: str, engine: str = "torch") -> tuple[str, ...]:
    """Returns the arguments of `treadle` for a kind of run.

    Args:
        context: Device, number of GPUs, engines.
        kind: A key of `KINDS`.
        engine: What samples.
    """
    return (*KINDS[kind](context), *_engine(context, engine))


def _together(_: Context) -> Sequence[str]:
    return (*_BFLOAT16, *_SHARED_MEMORY)


def _in_turn(_: Context) -> Sequence[str]:
    return (*_BFLOAT16, *_SHARED_MEMORY, *_IN_TURN)


def _collective(context: Context) -> Sequence[str]:
    common = (*_BFLOAT16, "sync.transport.kind=collective")
    if not context.on_gpu:
        return common
    apart = ("launch.gpus_per_node=2", "launch.placement=separate", "policy.parallel.data=1")
    return (*common, "sync.transport.backend=nccl", *apart)


def _tensor_parallel(context: Context) -> Sequence[str]:
    common = ("policy.parallel.tensor=2", *_BFLOAT16, *_SHARED_MEMORY)
    return (*common, "launch.gpus_per_node=2") if context.on_gpu else common


def _two_gpus(_: Context) -> Sequence[str]:
    return (
        *_SHARED_MEMORY,
        *("launch.gpus_per_node=2", "rollout.tensor_model_parallel_size=2"),
    )


def _four_gpus(_: Context) -> Sequence[str]:
    return (
        *("launch.gpus_per_node=4", "launch.placement=separate", "policy.parallel.data=1"),
        *("policy.parallel.tensor=2", "rollout.tensor_model_parallel_size=2"),
        *("sync.transport.kind=collective", "sync.transport.backend=nccl"),
    )


def _all_gpus(context: Context) -> Sequence[str]:
    return (*_SHARED_MEMORY, f"launch.gpus_per_node={context.num_gpus}")


KINDS: Mapping[str, Callable[[Context], Sequence[str]]] = {
    "together": _together,
    "in_turn": _in_turn,
    "collective": _collective,
    "tensor_parallel": _tensor_parallel,
    "two_gpus": _two_gpus,
    "four_gpus": _four_gpus,
    "all_gpus": _all_gpus,
}
"""Kind of run -> its settings, beside those of the engine.

together: policy and server share the device at the same time. in_turn: one after the other, with
all that can leave the device off it. collective: the policy broadcasts to a server on another
device. tensor_parallel: two ranks share the model, in turn with a server on each device. two_gpus:
a server has the model on two devices, in turn with two ranks. four_gpus: two ranks broadcast to a
server of two devices. all_gpus: what follows from the number of GPUs alone.
"""


def _engine(context: Context, engine: str) -> Sequence[str]:
    if engine == "torch":
        return ()
    command = context.engines[engine]
    if (path := os.environ.get("PYTHONPATH")) is not None:  # the trainer passes none to a command
        command = ("env", f"PYTHONPATH={path}", *command)
    chosen = (f"rollout.name={engine}", f"rollout.server_command={json.dumps(command)}")
    share = ("rollout.gpu_memory_utilization=0.4",)
    return (*chosen, *share) if context.on_gpu else chosen


def _run(context: Context, *arguments: str) -> Figures:
    """Trains to the end; returns what the steps after the first took."""
    steps = _STEPS[context.device]
    common = (
        f"schedule.total_steps={steps}",
        "schedule.val_every=null",
        "schedule.val_before_train=false",
        "schedule.save_every=null",
    )
    trainer = Trainer(
        context.folder / "run", [*common, *(() if context.on_gpu else _SMALL), *arguments]
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
