"""What the page says of the machine: GPUs, driver, CUDA, versions. It imports no heavy library."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.launch.gpus import Gpu

_PACKAGES = (
    *("torch", "megatron-core", "transformers", "triton", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"),
    *("flash-attn", "transformer-engine", "ray", "numpy", "safetensors", "treadle-trainer"),
)


def machine_rows(gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """Returns (what, which); names of hosts and paths are left out.

    Args:
        gpus: Those that this process may use.
    """
    names = [f"{gpu.name}, {gpu.memory_bytes / (1 << 30):.1f} GiB" for gpu in gpus]
    counted = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    cpus = f"{len(os.sched_getaffinity(0))} processors, {_memory()} of memory"
    rows = [
        ("GPUs", "; ".join(counted) or "none"),
        ("driver", ", ".join(sorted({gpu.driver for gpu in gpus})) or "none"),
        ("CUDA of the driver", _driver_cuda() or "none"),
        ("machine", f"{cpus}, Linux {platform.release()}"),
        ("Python", platform.python_version()),
        ("packages", ", ".join(_versions())),
        ("sources", _sources()),
    ]
    if commit := _commit():
        rows.append(("commit", commit))
    return rows


def _versions() -> list[str]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return found


def _driver_cuda() -> str:
    """Returns the newest version of CUDA that the driver supports, which `nvidia-smi` prints."""
    found = re.search(r"CUDA Version:\s*([\d.]+)", _output("nvidia-smi"))
    return found[1] if found else ""


def _sources() -> str:
    """Returns a digest of all Python sources, so that results of changed ones are not taken."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for folder in ("packages", "proto", "tests", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    folder = str(Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "--short=12", "HEAD").strip()
    changed = commit and _output("git", "-C", folder, "status", "--porcelain", "-uno")
    return f"{commit}, with changes" if changed else commit


def _memory() -> str:
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return f"{int(fields['MemTotal'].split()[0]) / (1 << 20):.0f} GiB"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
