"""Checks of the machine: torch and its GPUs, the doctors, and kernels that are optional."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.check import CheckFailed, Context, Figures, expect

from treadle.trainer.demo import DEMO

_OPTIONAL = {"flash_attn": "flash-attn", "transformer_engine": "transformer-engine"}


def check_torch(context: Context) -> Figures:
    """A product in bfloat16 is as exact as on the CPU, and the GPUs are those of the driver."""
    import torch

    figures: Figures = {"torch": torch.__version__, "CUDA build": torch.version.cuda or "none"}
    device = torch.device(context.device)
    if context.on_gpu:
        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        expect(
            seen == context.num_gpus,
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees {seen} GPUs, and "
            f"nvidia-smi lists {context.num_gpus}",
        )
        major, minor = torch.cuda.get_device_capability()
        figures["compute capability"] = f"{major}.{minor}"
        nccl = torch.cuda.nccl.version()
        figures["NCCL"] = ".".join(map(str, nccl))
        cudnn = torch.backends.cudnn.version()
        figures["cuDNN"] = str(cudnn)
    size, times = (8192, 20) if context.on_gpu else (256, 2)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator).to(device).bfloat16() for _ in range(2))
    product = a @ b
    exact = a[:64].cpu().double() @ b.cpu().double()
    error = float((product[:64].cpu().double() - exact).abs().max() / exact.abs().max())
    expect(error < 2**-7, f"a product in bfloat16 is off by {error:.3g} of its largest element")
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        product = a @ b
    _wait(device)
    rate = 2 * size**3 * times / (time.perf_counter() - began)
    return {**figures, "bfloat16 product, TFLOP/s": rate / 1e12, "its relative error": error}


def check_doctor(context: Context) -> Figures:
    """Runs the trainer's doctor, with the server's for the torch engine."""
    command = [sys.executable, "-m", "treadle.trainer.main", "doctor", "--json"]
    areas = json.loads(_output(command))
    return _judged([row for rows in areas.values() for row in rows])


def check_server_doctor(context: Context, engine: str) -> Figures:
    """Runs the server's doctor in the environment of an engine."""
    model = context.model or DEMO.parent / "model"
    command = [*context.engines[engine], "doctor", "--engine", engine, "--json"]
    command += ["--model.path", str(model)]
    rows = json.loads(_output(command))
    versions = {"torch", "transformers", engine}
    known: Figures = {row["check"]: row["value"] for row in rows if row["check"] in versions}
    return known | _judged(rows)


def check_optional_kernels(context: Context) -> Figures:
    """What is installed of flash-attn and transformer-engine can be imported."""
    import importlib
    import importlib.metadata
    import importlib.util

    figures: Figures = {}
    for module, name in _OPTIONAL.items():
        if importlib.util.find_spec(module) is None:
            figures[name] = "not installed, not needed"
            continue
        try:
            importlib.import_module(module)
        except Exception as error:
            raise CheckFailed(
                f"{name} is installed and cannot be imported: {error}. Megatron and transformers "
                f"import it where it is there: pip uninstall {name}, or install its wheel for this "
                "torch and CUDA"
            ) from error
        figures[name] = importlib.metadata.version(name)
    return figures


def _wait(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    expect(
        done.returncode in (0, 1),
        f"{' '.join(command[-4:])} ended with status {done.returncode}:\n{done.stderr[-2000:]}",
    )
    return done.stdout


def _judged(rows: Sequence[Mapping[str, str]]) -> Figures:
    """Returns the number of findings of each level, and the warnings by name."""
    bad = [
        f"{row['check']}: {row['value']}, because {row['cause']}; {row['fix']}"
        for row in rows
        if row["level"] == "FAIL"
    ]
    expect(not bad, "\n".join(bad))
    warnings = [row["check"] for row in rows if row["level"] == "WARN"]
    return {
        "good": sum(row["level"] == "OK" for row in rows),
        "warnings": f"{len(warnings)} ({', '.join(warnings)})" if warnings else "none",
    }
