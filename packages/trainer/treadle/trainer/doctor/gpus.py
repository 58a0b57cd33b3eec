"""Checks of the GPUs, and of the environment variables that steer CUDA and NCCL."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from treadle.tracing.diagnosis import Diagnosis, fail, gib, ok, warn
from treadle.trainer.launch.gpus import Gpu

__all__ = ["check_gpus"]

_INTERFACES = Path("/sys/class/net")
_SLOWER: Final[Mapping[str, str]] = MappingProxyType(
    {
        "NCCL_P2P_DISABLE": "GPUs exchange data through host memory",
        "NCCL_SHM_DISABLE": "processes of one machine exchange data over the network",
        "NCCL_IB_DISABLE": "machines exchange data over TCP instead of InfiniBand",
        "CUDA_LAUNCH_BLOCKING": "each kernel waits for the one before it",
    }
)


def check_gpus(
    gpus: Sequence[Gpu],
    environ: Mapping[str, str] = os.environ,
    *,
    interfaces: Path = _INTERFACES,
) -> Iterator[Diagnosis]:
    """Runs the checks of this module.

    Args:
        environ: The environment variables; processes of a run inherit them.
        interfaces: Directory with an entry for each network interface.
    """
    if not gpus:
        yield ok("GPUs", "none: policy and servers compute on the CPU")
    for index, gpu in enumerate(gpus):
        yield _memory(index, gpu)
    yield from _visible(gpus, environ)
    yield from _cumem(environ)
    yield from _interfaces_exist(environ, interfaces)
    for name, effect in _SLOWER.items():
        if environ.get(name, "0") not in ("", "0"):
            yield warn(name, environ[name], effect, f"unset {name}, unless you search a fault")


def _memory(index: int, gpu: Gpu) -> Diagnosis:
    size = f"{gib(gpu.free_bytes)} of {gib(gpu.memory_bytes)} free"
    value = f"{gpu.name}, {size}, driver {gpu.driver}"
    if gpu.free_bytes < gpu.memory_bytes * 0.9:
        return warn(
            f"GPU {index}",
            value,
            "another process uses its memory; engines take a share of all of it",
            "end what nvidia-smi lists, or lower rollout.gpu_memory_utilization",
        )
    return ok(f"GPU {index}", value)


def _visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or not gpus:
        return
    named = [part.strip() for part in text.split(",") if part.strip()]
    missing = [part for part in named if part.isdecimal() and int(part) >= len(gpus)]
    if missing:
        yield fail(
            "CUDA_VISIBLE_DEVICES",
            text,
            f"there is no GPU {', '.join(missing)} among the {len(gpus)} of this machine; CUDA "
            "hides it and all that follow",
            f"name GPUs from 0 to {len(gpus) - 1}, or unset it",
        )
    elif not named or "-1" in named:
        yield warn(
            "CUDA_VISIBLE_DEVICES", text, "it hides all GPUs", "unset it, or name the GPUs to use"
        )
    else:
        yield ok("CUDA_VISIBLE_DEVICES", text)


def _cumem(environ: Mapping[str, str]) -> Iterator[Diagnosis]:
    if environ.get("NCCL_CUMEM_ENABLE") == "0":
        yield warn(
            "NCCL_CUMEM_ENABLE",
            "0",
            "vLLM warns `NCCL_CUMEM_ENABLE is set to 0, skipping override. This may increase "
            "memory overhead with cudagraph+allreduce`: CUDA graphs then hold buffers twice",
            "unset NCCL_CUMEM_ENABLE; keep it only where NCCL fails without (NCCL issue 1234)",
        )


def _interfaces_exist(environ: Mapping[str, str], interfaces: Path) -> Iterator[Diagnosis]:
    try:
        present = sorted(entry.name for entry in interfaces.iterdir())
    except OSError:
        return  # nothing is known about them
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = environ.get(variable, "")
        if not text or text.startswith("^"):  # a list of what is left out
            continue
        exact = text.startswith("=") or variable.startswith("GLOO")
        wanted = [part.strip() for part in text.removeprefix("=").split(",")]
        if any(
            name == part or (not exact and name.startswith(part))
            for name in present
            for part in wanted
        ):
            yield ok(variable, text)
        else:
            yield fail(
                variable,
                text,
                f"this machine has no such interface, only {', '.join(present) or 'none'}: ranks "
                "cannot connect to each other",
                f"set {variable} to one of them, or unset it",
            )
