"""Imports libraries in a separate process and reports the results.

Invariant: a library that crashes its process on import ends the probe and not the doctor; results
that the probe printed before the crash are kept. The probe has the import path of a policy rank, so
it imports what training imports.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.tracing.child_process import supervised
from treadle.trainer.launch.environment import child_environment
from treadle.trainer.launch.process import child_python_path

__all__ = ["Probed", "probe"]

_DEADLINE_S = 300.0
# One line per fact, so that what was said before a crash is kept.
_PROGRAM = """
import importlib, json, sys

def say(**fact):
    print(json.dumps(fact), flush=True)

for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        say(module=name, error=f"{type(error).__name__}: {error}")
        continue
    say(module=name, place=getattr(module, "__file__", None) or "", error="")
    if name == "torch":
        say(cuda_build=module.version.cuda)
        say(cuda_devices=module.cuda.device_count() if module.cuda.is_available() else 0)
        if module.version.cuda:
            try:
                module.cuda.init()
            except Exception as error:
                say(cuda_error=f"{type(error).__name__}: {error}")
    if name == "triton":
        try:
            say(triton=str(module.runtime.driver.active.get_current_target()))
        except Exception as error:
            say(triton_error=f"{type(error).__name__}: {error}")
"""


@dataclass(slots=True, kw_only=True)
class Probed:
    """The answer of the probe.

    Attributes:
        errors: Module -> "" if it can be imported, else the error.
        cuda_build: CUDA version of the torch build; None for a CPU build, or without torch.
        cuda_devices: Number of GPUs that torch can use.
        cuda_error: Why torch cannot use a GPU; "" if it can, or was not built for GPUs.
        triton_error: Why triton has no active driver; "" if it has one, or was not imported.
    """

    errors: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    cuda_build: str | None = None
    cuda_devices: int = 0
    cuda_error: str = ""
    triton_error: str = ""


def probe(modules: Sequence[str], extra: Mapping[str, str] | None = None) -> Probed:
    """Imports the modules in order; takes as long as that.

    Args:
        extra: Additional environment variables of the process.
    """
    try:
        ended = subprocess.run(
            supervised([sys.executable, "-P", "-c", _PROGRAM, *modules]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
            env=child_environment(child_python_path(), extra or {}),
            check=False,
        )
        said, why = ended.stdout, f"the process that imports it ended with {ended.returncode}"
    except subprocess.TimeoutExpired as late:
        output = late.stdout
        said = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
        why = f"the import took longer than {_DEADLINE_S:g} s"
    found = Probed()
    for line in said.splitlines():
        _note(found, line)
    for module in modules:
        if module not in found.errors:
            found.errors[module] = why
    return found


def _note(found: Probed, line: str) -> None:
    """Takes a line of the probe; libraries print lines too, which are ignored."""
    try:
        fact: Any = json.loads(line)
    except ValueError:
        return
    if not isinstance(fact, dict):
        return
    if (module := fact.get("module")) is not None:
        found.errors[module] = fact["error"]
        found.places[module] = fact.get("place", "")
    else:
        for name in fact.keys() & {"cuda_build", "cuda_devices", "cuda_error", "triton_error"}:
            setattr(found, name, fact[name])
