"""Checks of the machine: GPUs, shared memory, addresses, limits and processors."""

from collections.abc import Iterator

from treadle.rollout_server.doctor.facts import Facts
from treadle.tracing.diagnosis import Diagnosis, fail, gib, ok, warn

_SHM_BYTES = 1 << 30  # Maximum size of the queues between an engine's processes.
_OTHER_DESCRIPTORS = 512  # Of libraries, engine processes and staged tensors.


def check_host(facts: Facts) -> Iterator[Diagnosis]:
    """Runs the checks of this module."""
    yield from _gpus(facts)
    yield _shared_memory(facts)
    yield _memfd(facts)
    yield from _addresses(facts)
    yield _descriptors(facts)
    yield from _locked_memory(facts)
    yield from _threads(facts)


def _gpus(facts: Facts) -> Iterator[Diagnosis]:
    for index, gpu in enumerate(facts.gpus):
        yield ok(f"GPU {index}", f"{gpu.name}, {gib(gpu.memory_bytes)}, driver {gpu.driver}")
    model = facts.config.model
    wanted = model.tensor_model_parallel_size * model.data_parallel_size
    # The check of torch's build reports GPUs that torch cannot see.
    here = facts.cuda_devices or len(facts.gpus)
    if here and facts.config.engine in ("vllm", "vllm_stock", "sglang") and wanted > here:
        yield fail(
            "parallel sizes",
            f"{wanted} GPUs",
            f"{model.tensor_model_parallel_size} (tensor) times {model.data_parallel_size} (data) "
            f"are configured, but {here} are available",
            "lower model.tensor_model_parallel_size or model.data_parallel_size, or check "
            "CUDA_VISIBLE_DEVICES",
        )


def _shared_memory(facts: Facts) -> Diagnosis:
    free = facts.shm_free_bytes
    fix = "give the container more (docker run --shm-size=8g, or an emptyDir of medium Memory)"
    if free is None:
        return fail("/dev/shm", "missing", "engine processes share memory there", fix)
    if free < _SHM_BYTES:
        return warn("/dev/shm", f"{gib(free)} free", "NCCL and the engines fill it", fix)
    return ok("/dev/shm", f"{gib(free)} free")


def _memfd(facts: Facts) -> Diagnosis:
    if facts.memfd is None:
        cause = "the process that checks it crashed in an import"
        return warn("memory between processes", "unknown", cause, "fix the imports first")
    if facts.memfd:
        return fail(
            "memory between processes",
            facts.memfd,
            "weights are passed as /proc/<pid>/fd/<n>, which this system forbids",
            "run trainer and server as one user in one PID namespace; lift hidepid of /proc",
        )
    return ok("memory between processes", "a memfd can be read through /proc")


def _addresses(facts: Facts) -> Iterator[Diagnosis]:
    for key, problem in facts.listening.items():
        text = getattr(facts.config, key)
        if problem:
            fix = f"choose another --{key}; port 0 picks a free one"
            yield fail(key, text, problem, fix)
        else:
            yield ok(key, text)


def _descriptors(facts: Facts) -> Diagnosis:
    # Every call may come from a separate client with a separate connection.
    admission = facts.config.admission
    wanted = _OTHER_DESCRIPTORS + admission.max_in_flight + admission.max_queued
    value = str(facts.open_files)
    if facts.open_files < wanted:
        cause = f"{wanted} may be open if every admitted call comes from a separate client"
        return warn("open files", value, cause, f"ulimit -n {wanted}, or LimitNOFILE of the unit")
    return ok("open files", value)


def _locked_memory(facts: Facts) -> Iterator[Diagnosis]:
    if not facts.gpus or not facts.infiniband or facts.locked_bytes is None:
        return
    yield warn(
        "locked memory",
        f"{facts.locked_bytes >> 10} KiB",
        "NCCL over InfiniBand locks its buffers",
        "ulimit -l unlimited, or LimitMEMLOCK=infinity of the unit",
    )


def _threads(facts: Facts) -> Iterator[Diagnosis]:
    if facts.gpus or facts.config.engine == "fake":
        return
    set_to, threads = facts.omp_num_threads, facts.config.model.num_threads
    value = f"{facts.cpus} processors, OMP_NUM_THREADS={set_to}, model.num_threads={threads}"
    wanted = threads
    if threads is None and set_to is not None and set_to.isdecimal():
        wanted = int(set_to)
    fix = f"--model.num_threads {facts.cpus}, or fewer if other processes compute here"
    if wanted is None:
        cause = "the library starts one thread per processor of the machine; they wait by spinning"
        yield warn("threads", value, cause, fix)
    elif wanted > facts.cpus:
        cause = "with more threads than processors, threads wait by spinning"
        yield warn("threads", value, cause, fix)
    else:
        yield ok("threads", value)
