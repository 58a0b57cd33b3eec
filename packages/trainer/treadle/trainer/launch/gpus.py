"""The GPUs of this machine, and those of this process: what CUDA_VISIBLE_DEVICES does not hide."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.tracing.child_process import supervised

__all__ = ["Gpu", "all_gpus", "find_gpus", "visible_devices"]

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ASK = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total,memory.free,driver_version,name",
    "--format=csv,noheader,nounits",
)
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU, as reported by its driver.

    Attributes:
        index: Among those of the machine, as CUDA_VISIBLE_DEVICES may name it.
    """

    index: str
    uuid: str
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


def all_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs of this machine; none without a driver.

    It runs `nvidia-smi`, so that torch is not imported and no CUDA context is created.
    """
    try:
        answer = subprocess.run(
            supervised(_ASK),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=True,
        )
        return tuple(_read(line) for line in filter(None, answer.stdout.splitlines()))
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()


def _read(line: str) -> Gpu:
    index, uuid, total, free, driver, name = (part.strip() for part in line.split(",", 5))
    return Gpu(
        index=index,
        uuid=uuid,
        name=name,
        memory_bytes=int(total) << 20,
        free_bytes=int(free) << 20,
        driver=driver,
    )


def find_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use, in CUDA's order."""
    gpus, variable = all_gpus(), os.environ.get(_VARIABLE)
    if variable is None:
        return gpus
    found = []
    for wanted in filter(None, (part.strip() for part in variable.split(","))):
        match = [gpu for gpu in gpus if wanted == gpu.index or wanted in gpu.uuid]
        if not match:
            break  # CUDA too ignores what comes after an unknown device
        found.append(match[0])
    return tuple(found)


def visible_devices(indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows a child some of the GPUs that `environment` shows.

    Args:
        indices: Positions of the GPUs among those. Empty: the child sees what its parent does.
    """
    if not indices:
        return {}
    shown = environment.get(_VARIABLE)
    names = None if shown is None else [part.strip() for part in shown.split(",") if part.strip()]
    if names is None:
        return {_VARIABLE: ",".join(map(str, indices))}
    return {_VARIABLE: ",".join(names[index] for index in indices if index < len(names))}
