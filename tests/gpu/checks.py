"""The checks, in the order in which they are run: from the machine to whole runs and throughput.

Invariant: a check comes after those that it needs. The table imports no check: each is imported by
its own process.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from gpu.check import Check, Context, Figures

_ENGINES = ("torch", "vllm", "sglang")
_FOREIGN = ("vllm", "sglang")
_SEVERAL = "the CPU has no devices of which each process gets its own"


def _engine(name: str) -> str:
    return "" if name == "torch" else name


def _environment(engine: str) -> str:
    """Returns the check that says whether an engine can run here."""
    return "torch" if engine == "torch" else f"doctor_{engine}"


def _late(module: str, name: str, **arguments: str) -> Callable[[Context], Figures]:
    """Returns a check of a module that is imported when it is run: most of them import torch."""

    def run(context: Context) -> Figures:
        check: Callable[..., Figures] = getattr(importlib.import_module(module), name)
        return check(context, **arguments)

    return run


def _machine() -> Iterator[Check]:
    yield Check(
        name="torch",
        shows="torch sees the GPUs that nvidia-smi lists, and its bfloat16 product is right.",
        run=_late("gpu.machine_checks", "check_torch"),
    )
    yield Check(
        name="doctor",
        shows="`treadle doctor` finds nothing that fails.",
        run=_late("gpu.machine_checks", "check_doctor"),
    )
    yield Check(
        name="optional_kernels",
        shows="flash-attn and transformer-engine, where installed, can be imported.",
        run=_late("gpu.machine_checks", "check_optional_kernels"),
    )
    for engine in _FOREIGN:
        yield Check(
            name=f"doctor_{engine}",
            shows=f"The server's doctor finds nothing that fails in the environment of {engine}.",
            run=_late("gpu.machine_checks", "check_server_doctor", engine=engine),
            engine=engine,
        )


def _policies() -> Iterator[Check]:
    yield Check(
        name="policy_logprobs",
        shows="The policy's log-probabilities are those of transformers, in float32 and bfloat16.",
        run=_late("gpu.policy_checks", "check_logprobs"),
        needs=("torch",),
    )
    yield Check(
        name="policy_gradient",
        shows="Loss and norm of the gradient of a step of the policy are those of transformers.",
        run=_late("gpu.policy_checks", "check_gradient"),
        needs=("policy_logprobs",),
    )
    yield Check(
        name="policy_prefixes",
        shows="Shared prefixes leave the log-probabilities as they are.",
        run=_late("gpu.policy_checks", "check_shared_prefixes"),
        needs=("policy_logprobs",),
    )
    yield Check(
        name="policy_offload",
        shows="With policy.offload, steps are the same, and the device is left empty.",
        run=_late("gpu.policy_checks", "check_offload"),
        needs=("policy_logprobs",),
    )


def _servers() -> Iterator[Check]:
    for engine in _ENGINES:
        for dtype in ("float32", "bfloat16"):
            yield Check(
                name=f"{engine}_{dtype}",
                shows=f"The conformance kit holds for {engine} in {dtype}: tokens and "
                "log-probabilities as in transformers, updates of weights, released memory.",
                run=_late("gpu.server_checks", "check_conformance", engine=engine, dtype=dtype),
                needs=(_environment(engine),),
                engine=_engine(engine),
                limit_s=1800.0,
            )


def _runs() -> Iterator[Check]:
    for engine in _ENGINES:
        # Not the conformance of the engine: one check of the kit may fail where a run does not.
        needs = ("policy_logprobs", _environment(engine))
        yield Check(
            name=f"run_{engine}",
            shows=f"A run with {engine} ends, policy and server at once on one GPU; the weights go "
            "through shared memory.",
            run=_late("gpu.run_checks", "check_run", kind="together", engine=engine),
            needs=needs,
            engine=_engine(engine),
        )
        yield Check(
            name=f"run_{engine}_in_turn",
            shows=f"A run with {engine} ends, policy and server in turn on one GPU.",
            run=_late("gpu.run_checks", "check_run", kind="in_turn", engine=engine),
            needs=(*needs, "policy_offload"),
            engine=_engine(engine),
        )
    yield Check(
        name="run_collective",
        shows="The policy broadcasts its weights over NCCL to a server on another GPU.",
        run=_late("gpu.run_checks", "check_run", kind="collective"),
        needs=("run_torch",),
        gpus=2,
    )
    yield Check(
        name="run_tensor_parallel",
        shows="Two ranks share the model over NCCL.",
        run=_late("gpu.run_checks", "check_run", kind="tensor_parallel"),
        needs=("run_torch",),
        gpus=2,
    )
    for engine in _FOREIGN:
        yield Check(
            name=f"run_{engine}_two_gpus",
            shows=f"{engine} shares its model between two GPUs, in turn with two ranks.",
            run=_late("gpu.run_checks", "check_run", kind="two_gpus", engine=engine),
            needs=(f"run_{engine}_in_turn",),
            engine=engine,
            gpus=2,
            only_gpu=_SEVERAL,
        )
        yield Check(
            name=f"run_{engine}_four_gpus",
            shows=f"Two ranks of one model broadcast over NCCL to {engine} on two other GPUs.",
            run=_late("gpu.run_checks", "check_run", kind="four_gpus", engine=engine),
            needs=(f"run_{engine}_two_gpus", "run_collective", "run_tensor_parallel"),
            engine=engine,
            gpus=4,
            only_gpu=_SEVERAL,
        )
    yield Check(
        name="run_all_gpus",
        shows="launch.gpus_per_node alone gives policy and servers all GPUs of the machine.",
        run=_late("gpu.run_checks", "check_run", kind="all_gpus"),
        needs=("run_torch",),
        only_gpu=_SEVERAL,
    )


def _speeds() -> Iterator[Check]:
    yield Check(
        name="speed_training",
        shows="Tokens per second of a training step (benchmarks/train_step.py).",
        run=_late("gpu.speed_checks", "measure_training"),
        needs=("policy_logprobs",),
    )
    yield Check(
        name="speed_torch_engine",
        shows="Tokens per second of the torch engine (benchmarks/engine_throughput.py).",
        run=_late("gpu.speed_checks", "measure_torch_engine"),
        needs=("torch",),
    )
    for engine in _ENGINES:
        yield Check(
            name=f"speed_{engine}_server",
            shows=f"Tokens per second through a server with {engine} "
            "(benchmarks/engine_server_ratio.py).",
            run=_late("gpu.speed_checks", "measure_server", engine=engine),
            needs=(_environment(engine),),
            engine=_engine(engine),
        )


_ABOUT_S: Final = {
    **{"run_vllm": 150.0, "run_vllm_in_turn": 100.0, "vllm_bfloat16": 120.0, "vllm_float32": 120.0},
    **{"speed_vllm_server": 120.0, "speed_training": 60.0, "policy_offload": 60.0},
    **{"run_sglang": 150.0, "run_sglang_in_turn": 100.0, "speed_sglang_server": 120.0},
    **{"sglang_bfloat16": 120.0, "sglang_float32": 120.0},
}
"""Estimates; the machine's own start is not in them."""

CHECKS = tuple(
    replace(check, about_s=_ABOUT_S.get(check.name, check.about_s))
    for check in (*_machine(), *_policies(), *_servers(), *_runs(), *_speeds())
)
"""All checks, in an order in which each comes after what it needs; `main.py` runs them."""

_FIRST: Final = (
    *("run_vllm", "speed_training", "vllm_bfloat16", "speed_vllm_server", "run_vllm_in_turn"),
    *("run_collective", "run_tensor_parallel", "run_vllm_two_gpus", "run_vllm_four_gpus"),
    *("run_sglang", "sglang_bfloat16", "speed_sglang_server", "run_sglang_in_turn"),
    *("policy_logprobs", "policy_gradient", "run_torch", "run_torch_in_turn", "torch_bfloat16"),
    *("policy_offload", "speed_torch_engine", "speed_torch_server", "torch"),
)
"""What nobody has seen, then what a change may have broken."""


def by_value(checks: Sequence[Check]) -> list[Check]:
    """Returns the checks in the order in which minutes of a GPU are best used.

    A check may come before those that it needs, which count only where they have failed already.
    """
    place = {name: number for number, name in enumerate(_FIRST)}
    return sorted(checks, key=lambda check: place.get(check.name, len(place)))
