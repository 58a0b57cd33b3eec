"""Checks of the interpreter and its packages: versions, places, imports and builds."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from treadle.policy.backends.registry import describe
from treadle.tracing.diagnosis import Diagnosis, fail, ok, warn
from treadle.trainer.doctor.probe import Probed, probe

__all__ = [
    "LEAST",
    "check_build",
    "check_datasets",
    "check_environment",
    "check_flash_attention",
    "check_import_path",
    "check_places",
    "check_triton",
    "check_virtual_environment",
    "release",
]

LEAST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "torch": "2.8",
        "transformers": "5.23",
        "grpcio": "1.76",
        "huggingface-hub": "1.0",
        "numpy": "2",
        "protobuf": "6.31.1",
        "pyarrow": "20",
        "pydantic": "2.12",
        "safetensors": "0.6",
    }
)
"""Distribution -> the oldest version that the trainer works with, as in its pyproject.toml."""
_OLDEST_PYTHON = (3, 11)
_IMPORTED = ("torch", "transformers", "megatron.core", "pyarrow", "grpc")
# Not needed, and harmful when broken: transformers and Megatron import what is installed.
_HARMFUL = ("flash_attn", "triton", "transformer_engine")
_LISTS = "4.0"  # The first version of datasets with the feature type 'List'.
_WAYS = (os.path.abspath, os.path.realpath)
_INSTALL = "pip install treadle-trainer, in a fresh environment"


def check_environment(
    environ: Mapping[str, str] = os.environ, *, num_gpus: int
) -> Iterator[Diagnosis]:
    """Runs the checks of this module; takes as long as importing torch.

    Args:
        num_gpus: Number of GPUs that the driver reports.
    """
    yield _python()
    yield check_virtual_environment(environ)
    yield check_import_path(environ)
    yield from _versions()
    present = [name for name in _HARMFUL if importlib.util.find_spec(name) is not None]
    found = probe([*_IMPORTED, *present])
    yield from _imports(found)
    yield check_places(found)
    yield from check_build(found, num_gpus)
    yield from check_triton(found)
    yield check_flash_attention(found)
    yield check_datasets()


def _python() -> Diagnosis:
    version = platform.python_version()
    if sys.version_info[:2] < _OLDEST_PYTHON:
        return fail("python", version, "too old", "use Python 3.11 or newer")
    return ok("python", f"{version}, {sys.executable}")


def check_virtual_environment(environ: Mapping[str, str]) -> Diagnosis:
    """Finds that another environment is activated than the one that runs."""
    active = environ.get("VIRTUAL_ENV") or environ.get("CONDA_PREFIX") or ""
    if not active or Path(active).resolve() == Path(sys.prefix).resolve():
        return ok("environment", sys.prefix)
    return warn(
        "environment",
        sys.prefix,
        f"the shell has {active} activated, and this command runs in another environment",
        f"run {Path(active) / 'bin' / 'treadle'}, or deactivate {active}: what you install with "
        "pip may land in the other one",
    )


def check_import_path(environ: Mapping[str, str]) -> Diagnosis:
    """Finds packages of another Python, which are imported until one has a compiled part."""
    own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    foreign = [
        entry
        for entry in sys.path
        if (named := re.search(r"/(python3\.\d+)(/|$)", entry)) is not None and named[1] != own
    ]
    if foreign:
        return fail(
            "import path",
            ", ".join(foreign),
            f"it holds packages of another Python than this {own}",
            "unset PYTHONPATH, or take this entry out of it"
            if environ.get("PYTHONPATH")
            else "remove the .pth file that adds it",
        )
    return ok("import path", f"{len(sys.path)} entries, none of another Python")


def _versions() -> Iterator[Diagnosis]:
    exactly = describe("megatron").library
    assert exactly is not None, "it uses internals of Megatron-core"
    for name, wanted in {exactly.name: exactly.wanted, **LEAST}.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield fail(name, "not installed", "the trainer imports it", _INSTALL)
            continue
        exact = name == exactly.name
        if exact and version.partition("+")[0] not in exactly.versions:
            cause = f"the policy uses internals of {name} {' and '.join(exactly.versions)}"
            yield fail(name, version, cause, f'pip install "{name}=={wanted}"')
        elif not exact and release(version) < release(wanted):
            yield fail(name, version, f"older than {wanted}", f'pip install "{name}>={wanted}"')
        else:
            yield ok(name, version)


def _imports(found: Probed) -> Iterator[Diagnosis]:
    broken = [name for name in _IMPORTED if found.errors[name]]
    for name in broken:
        error = found.errors[name].splitlines()[0][:200]
        fix = _INSTALL
        if "undefined symbol" in error or "cannot open shared object" in error:
            fix = f"its compiled part was built for another torch or CUDA: {_INSTALL}"
        yield fail(f"import {name}", error, "it cannot be imported", fix)
    if not broken:
        yield ok("imports", f"{', '.join(_IMPORTED)} can be imported")


def check_places(found: Probed) -> Diagnosis:
    """Finds packages that come from outside of the environment: two environments are mixed."""
    # An environment may consist of links, and be reached through one.
    prefixes = {way(path) for path in (sys.prefix, sys.base_prefix) for way in _WAYS}
    outside = [
        f"{name} from {place}"
        for name, place in found.places.items()
        if place and not any(Path(way(place)).is_relative_to(p) for p in prefixes for way in _WAYS)
    ]
    users = site.getusersitepackages()
    if sys.prefix != sys.base_prefix and users in sys.path:
        outside.append(f"all of {users}")
    if outside:
        return warn(
            "places of packages",
            ", ".join(outside),
            f"they are imported from outside of the environment {sys.prefix}: processes on other "
            "nodes may import other versions, and the error then names neither",
            "unset PYTHONPATH, set PYTHONNOUSERSITE=1, or install them in the environment",
        )
    return ok("places of packages", f"all below {sys.prefix}")


def check_build(found: Probed, num_gpus: int) -> Iterator[Diagnosis]:
    """Checks that torch can use the GPUs of the machine."""
    if found.errors["torch"]:
        return
    build = "CPU build" if found.cuda_build is None else f"built for CUDA {found.cuda_build}"
    if found.cuda_error and num_gpus:
        yield fail(
            "torch build",
            build,
            found.cuda_error.splitlines()[0],
            "install the driver that this CUDA version needs, or a torch built for an older CUDA; "
            "check CUDA_VISIBLE_DEVICES",
        )
    elif found.cuda_build is None and num_gpus:
        yield fail(
            "torch build",
            build,
            "torch cannot use the GPUs of this machine",
            "install the CUDA build of torch: TREADLE_TORCH=cuda with pants, or 3rdparty/python/"
            "default-cuda.lock.txt",
        )
    elif found.cuda_build is not None and not found.cuda_devices and not num_gpus:
        yield warn(
            "torch build",
            f"{build}, no GPU",
            "neither torch nor nvidia-smi finds a driver with a GPU here: policy and torch engine "
            "compute on the CPU",
            "where there is a GPU, install NVIDIA's driver, or give the container the GPUs (docker "
            "run --gpus all); where there is none, torch's CPU build does the same in 5 GB less",
        )
    else:
        yield ok("torch build", f"{build}, {found.cuda_devices} GPUs usable")


def check_triton(found: Probed) -> Iterator[Diagnosis]:
    """Checks that triton belongs to this torch and finds the driver of its GPUs."""
    if "triton" not in found.errors:
        return
    version, wanted = _version_of("triton"), _of_torch("triton")
    if wanted is not None and version != wanted:
        yield fail(
            "triton",
            version,
            f"this torch was built with triton {wanted}; others end with `0 active drivers ([]). "
            "There should only be one.` or with errors of the compiler",
            f'pip install "triton=={wanted}"',
        )
    elif found.errors["triton"]:
        fix = "install the triton of this torch: pip install --force-reinstall torch"
        yield fail("triton", found.errors["triton"].splitlines()[0], "it cannot be imported", fix)
    elif found.triton_error and found.cuda_devices:
        yield fail(
            "triton",
            found.triton_error.splitlines()[0],
            "triton finds no driver for the GPU that torch uses: kernels cannot be compiled",
            "put libcuda.so.1 on the library path (ldconfig -p | grep libcuda), give the container "
            "the driver (docker run --gpus all), or set TRITON_LIBCUDA_PATH to its folder",
        )
    else:
        drivers = "no driver, as there is no GPU" if found.triton_error else "one active driver"
        yield ok("triton", f"{version}, {drivers}")


def check_flash_attention(found: Probed) -> Diagnosis:
    """Checks that what transformers and Megatron import if it is there can be imported."""
    broken = [n for n in ("flash_attn", "transformer_engine") if found.errors.get(n)]
    if not broken:
        here = "flash_attn" in found.errors
        return ok("flash-attn", _version_of("flash-attn") if here else "not installed, not needed")
    error = found.errors[broken[0]].splitlines()[0][:200]
    name = broken[0].replace("_", "-")
    return fail(
        "flash-attn",
        error,
        f"{name} is installed and broken, and transformers and Megatron import it when it is there",
        f"pip uninstall {name}: Treadle does not need it. To keep it, install the wheel that was "
        "built for this torch, CUDA and Python, with --no-build-isolation",
    )


def check_datasets() -> Diagnosis:
    """Finds a library `datasets` that cannot read what newer ones wrote."""
    try:
        version = importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError:
        return ok("datasets", "not installed; rows are read without it")
    if release(version) < release(_LISTS):
        return warn(
            "datasets",
            version,
            "files that datasets 4 or newer wrote end with `ValueError: Feature type 'List' not "
            "found` where your own code loads them with this version; Treadle reads them without "
            "it",
            f'pip install "datasets>={_LISTS}", in the environment that the error names last',
        )
    return ok("datasets", version)


def _version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _of_torch(distribution: str) -> str | None:
    """Returns the exact version of a distribution that the installed torch requires, if any."""
    try:
        needs = importlib.metadata.requires("torch") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    pattern = re.compile(rf"{re.escape(distribution)}\s*\(?==\s*([\w.]+)")
    return next((exact[1] for need in needs if (exact := pattern.match(need))), None)


def release(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version: (2, 13, 0) of "2.13.0+cpu" and of "2.13.0rc1"."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
