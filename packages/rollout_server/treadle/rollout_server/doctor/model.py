"""Checks of the model: its files, the weights directory, and memory."""

from collections.abc import Iterator

from treadle.rollout_server.doctor.facts import Facts, weight_bytes
from treadle.tracing.diagnosis import Diagnosis, fail, gib, ok, warn

_WITH_MODEL = ("torch", "vllm", "vllm_stock", "sglang")


def check_model(facts: Facts) -> Iterator[Diagnosis]:
    """Runs the checks of this module."""
    yield from _files(facts)
    yield from _weights_directory(facts)
    yield from _memory(facts)


def _files(facts: Facts) -> Iterator[Diagnosis]:
    model, path = facts.model, facts.config.model.path
    if model is None:
        if facts.config.engine in _WITH_MODEL:
            yield fail(
                "model", "unset", "the engine needs a model", "set --model.path to its directory"
            )
        return
    fix = "download the model again: config.json, *.safetensors, tokenizer.json"
    if model.problem:
        yield fail("model", str(path), model.problem, fix)
    elif model.missing:
        cause = f"files in the index are missing: {', '.join(model.missing[:4])}"
        yield fail("model", str(path), cause, fix)
    else:
        size = f"{model.num_elements / 1e6:,.0f} M parameters, {gib(weight_bytes(facts))}"
        yield ok("model", f"{path}: {size} as {facts.config.model.dtype}")
    if not model.problem and not model.has_tokenizer:
        cause = "clients compare its checksum with that of their tokenizer"
        yield warn("tokenizer", "no tokenizer.json", cause, "save the tokenizer beside the model")


def _weights_directory(facts: Facts) -> Iterator[Diagnosis]:
    directory = facts.config.weights.directory
    if directory is None:
        return
    if facts.weights_problem:
        fix = "create it, or mount it, and make it readable for this user"
        yield fail("weights.directory", str(directory), facts.weights_problem, fix)
    else:
        yield ok("weights.directory", str(directory))


def _memory(facts: Facts) -> Iterator[Diagnosis]:
    needed, model = weight_bytes(facts), facts.config.model
    if not needed or facts.config.engine not in _WITH_MODEL:
        return
    if facts.gpus and facts.cuda_devices and model.device != "cpu":
        share = needed // model.tensor_model_parallel_size
        room = int(facts.gpus[0].memory_bytes * (model.gpu_memory_utilization or 0.9))
        where, fix = "GPU memory", "raise model.tensor_model_parallel_size, or use bfloat16"
    elif facts.memory_bytes is not None:
        share, room = needed + (model.kv_cache_bytes or 0), facts.memory_bytes
        where, fix = "memory", "use a smaller model, bfloat16, or less model.kv_cache_bytes"
    else:
        return
    value = f"{gib(share)} of {gib(room)}"
    if share > room:
        yield fail(where, value, "the weights do not fit", fix)
    elif share + needed // model.tensor_model_parallel_size > room:
        cause = "staged updates hold the new weights in addition to the old ones"
        yield warn(where, value, cause, f"update in place (sync.in_place), or {fix}")
    else:
        yield ok(where, value)
