"""All environment variables that the trainer reads or sets."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = [
    "child_environment",
    "cpu_count",
    "foreign_environment",
    "thread_variables",
]

_OF_PYTHON = ("PYTHON", "PEX_", "VIRTUAL_ENV", "CONDA_", "__PYVENV_LAUNCHER__")
_KEPT = frozenset({"PEX_ROOT"})  # where any pex unpacks itself; does not change imports


def cpu_count() -> int:
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def thread_variables(threads: int) -> dict[str, str]:
    """Returns the variables that limit a child's numerical libraries to a number of threads.

    Idle workers sleep instead of spinning, since trainer and servers take turns on the same cores.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


def child_environment(python_path: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child that runs this interpreter with `python_path`."""
    return {**os.environ, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1", **extra}


def foreign_environment(program: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a child that brings its own Python and packages.

    Variables that set what an interpreter or a pex runs or imports are left out. The program's
    directory is put first in PATH unless it is listed, as if its environment were activated.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(_OF_PYTHON)
    }
    found = shutil.which(program)
    searched = kept.get("PATH", os.defpath).split(os.pathsep)
    if found is not None and (beside := str(Path(found).absolute().parent)) not in searched:
        kept["PATH"] = os.pathsep.join([beside, *searched])
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}
