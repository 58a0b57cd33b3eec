"""The GPUs of this process: those of the driver, less what CUDA_VISIBLE_DEVICES hides."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Gpu", "find_gpus", "visible_devices"]

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ASK = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,name", "--format=csv,noheader,nounits")
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: As the driver has it.
        memory_bytes: Of the device.
    """

    name: str
    memory_bytes: int


def find_gpus() -> tuple[Gpu, ...]:
    """Returns the GPUs that this process may use, in CUDA's order; none without a driver.

    It asks `nvidia-smi`, so that neither torch is imported nor a CUDA context made.
    """
    try:
        answer = subprocess.run(
            _ASK, capture_output=True, text=True, timeout=_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return _visible(answer.stdout.splitlines(), os.environ.get(_VARIABLE))


def _visible(lines: Sequence[str], variable: str | None) -> tuple[Gpu, ...]:
    """Returns those of `nvidia-smi` that the variable names, in its order; None names all."""
    names: list[tuple[str, str]] = []
    gpus: list[Gpu] = []
    for line in filter(None, lines):
        index, uuid, mebibytes, name = (part.strip() for part in line.split(",", 3))
        names.append((index, uuid))
        gpus.append(Gpu(name, int(mebibytes) << 20))
    if variable is None:
        return tuple(gpus)
    found = []
    for wanted in filter(None, (part.strip() for part in variable.split(","))):
        match = [n for n, (index, uuid) in enumerate(names) if wanted == index or wanted in uuid]
        if not match:
            break  # CUDA too ignores what comes after an unknown device
        found.append(gpus[match[0]])
    return tuple(found)


def visible_devices(indices: Sequence[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variable that shows a child some of the GPUs that `environment` shows.

    Args:
        indices: Of the GPUs, counted among those. Empty: the child sees what its parent does.
        environment: Of the parent.
    """
    if not indices:
        return {}
    shown = environment.get(_VARIABLE)
    names = None if shown is None else [part.strip() for part in shown.split(",") if part.strip()]
    if names is None:
        return {_VARIABLE: ",".join(map(str, indices))}
    return {_VARIABLE: ",".join(names[index] for index in indices if index < len(names))}
