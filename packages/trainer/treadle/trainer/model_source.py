"""Where a model comes from: a directory, a run, one of its checkpoints, or the Hugging Face Hub.

Invariant: what `resolve_model` returns is a local directory that holds a Hugging Face model; what
does not lead to one is a `SetupError` that names the cause, the value and the fix.

| `model.path` | model |
|---|---|
| a directory with config.json and tokenizer | itself |
| a run directory | the `hf` folder of its best or latest checkpoint, made if it is missing |
| RUN/checkpoints/step-00000040 | its `hf` folder, likewise |
| demo:calculator, demo:math_expression | those that ship with this package |
| ORG/NAME or ORG/NAME@REVISION | in the Hub's cache, downloaded if it is missing |
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from treadle.agent_loop import SetupError
from treadle.trainer.checkpoint.manifest import MANIFEST, DamageError, add_to_manifest
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    CONFIG,
    HF,
    Checkpoint,
    Checkpoints,
    RunDirectoryError,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig, ConfigT
from treadle.trainer.demo import MODELS, is_demo_model
from treadle.trainer.hub import download_model, is_model_id
from treadle.trainer.report.seals import seal_file

__all__ = ["convert", "exported_model", "resolve_model", "with_local_model", "with_model"]


def with_local_model(config: Config, *, weights: bool = True) -> Config:
    """Returns the configuration with `model.path` as the local directory of its model.

    `algorithm.reference_path` too, where it is set.

    Raises:
        SetupError: See `resolve_model`.
    """
    local = with_model(config, resolve_model(config.model.path, weights=weights))
    if (reference := config.algorithm.reference_path) is None:
        return local
    path = resolve_model(reference, weights=weights, setting="algorithm.reference_path")
    algorithm = config.algorithm.model_copy(update={"reference_path": path})
    return local.model_copy(update={"algorithm": algorithm})


def with_model(config: ConfigT, path: Path) -> ConfigT:
    """Returns the configuration with this `model.path`."""
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def resolve_model(source: Path | str, *, weights: bool = True, setting: str = "model.path") -> Path:
    """Returns the local directory of a model.

    Args:
        source: One of the table above. An existing path wins over a Hub id.
        weights: Whether the tensors are needed too, not only configuration and tokenizer. For a
            checkpoint without a Hugging Face directory it is then written into the checkpoint;
            else the directory is that of the model that the run began with.
        setting: Names the model, for messages.

    Raises:
        SetupError: There is no model, or it cannot be fetched.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        found = _in_directory(path, setting, weights=weights)
        if not (found / "config.json").is_file():
            raise SetupError(
                f"{setting}={source} holds no config.json; it must be a Hugging Face model "
                "directory, a run directory, or an id on the Hub as ORG/NAME"
            )
        return found
    if path.exists():
        raise SetupError(f"{setting}={source} is a file; it must be a directory")
    if is_demo_model(str(source)):
        if str(source) not in MODELS:
            raise SetupError(f"there is no {setting}={source}; there are: {', '.join(MODELS)}")
        return MODELS[str(source)]
    if is_model_id(str(source)):
        return download_model(str(source), weights=weights, setting=setting)
    raise SetupError(
        f"{setting}={source} does not exist; it must be a Hugging Face model directory, a run "
        "directory, or an id on the Hub as ORG/NAME"
    )


def exported_model(run_dir: Path) -> Path | None:
    """Returns the Hugging Face directory of a run's best or latest checkpoint, or None."""
    checkpoint = Checkpoints(run_dir / CHECKPOINTS, keep=1).chosen()
    return None if checkpoint is None else checkpoint.hf_directory


def _in_directory(path: Path, setting: str, *, weights: bool) -> Path:
    try:
        if (path / CHECKPOINTS).is_dir():
            checkpoint = Checkpoints(path / CHECKPOINTS, keep=1).chosen()
            if checkpoint is None:
                raise SetupError(f"{setting}={path} is a run directory without a checkpoint")
            return _model_of(checkpoint, path, setting, weights=weights)
        if path.parent.name == CHECKPOINTS and path.name.startswith("step-"):
            digits = path.name.removeprefix("step-")
            step = int(digits) if digits.isdecimal() else -1
            checkpoint = Checkpoints(path.parent, keep=1).at(step)
            return _model_of(checkpoint, path.parent.parent, setting, weights=weights)
    except RunDirectoryError as error:
        raise SetupError(f"{setting}={path}: {error}") from None
    return path


def _model_of(checkpoint: Checkpoint, run: Path, setting: str, *, weights: bool) -> Path:
    if checkpoint.hf_directory is not None:
        return checkpoint.hf_directory
    from treadle.policy.client.group import PolicyError
    from treadle.trainer.config.load import ConfigError, load_run_config
    from treadle.trainer.launch.process import ProcessError

    try:
        config = load_run_config(checkpoint.config_file or run / CONFIG)
        if not weights:
            return resolve_model(config.model.path, weights=False, setting=setting)
        place = checkpoint.policy_directory.absolute().parent
        building = place / f".{HF}.{os.getpid()}"
        try:
            # A thread, as the caller's may have an event loop.
            with ThreadPoolExecutor(1, thread_name_prefix="convert") as thread:
                work = convert(config, checkpoint, building, adapter=False)
                thread.submit(asyncio.run, work).result()
            add_to_manifest(place, HF, building)
            if (place / MANIFEST).exists():
                seal_file(run, checkpoint.step, f"{CHECKPOINTS}/{place.name}/{MANIFEST}")
            building.rename(place / HF)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except (ConfigError, DamageError, OSError, PolicyError, ProcessError) as error:
        raise SetupError(
            f"{setting}: the checkpoint of step {checkpoint.step} in {run} holds no Hugging Face "
            f"directory, and it cannot be written there: {error}. Write one elsewhere with "
            f"`treadle export {run} OUT --step {checkpoint.step}` and set {setting}=OUT"
        ) from error
    return place / HF


async def convert(config: AnyConfig, checkpoint: Checkpoint, out: Path, *, adapter: bool) -> None:
    """Writes the model of a checkpoint as a Hugging Face directory, by one policy rank.

    Args:
        out: Absolute path, which must not exist.
        adapter: Whether to write the LoRA adapter alone.

    Raises:
        PolicyError: The model cannot be read.
        ProcessError: The rank cannot be started.
        SetupError: The model that the run began with is not there.
    """
    from treadle.policy.client.group import PolicyGroup
    from treadle.policy.config.policy import ParallelConfig
    from treadle.policy.v1.checkpoint_service_pb2 import (
        LoadRequest,
        SaveAdapterRequest,
        SaveHfRequest,
    )
    from treadle.trainer.launch.environment import cpu_count
    from treadle.trainer.launch.local import LocalLauncher
    from treadle.trainer.launch.policy_ranks import rank_starter

    base = await asyncio.to_thread(resolve_model, config.model.path)
    one = config.policy.model_copy(update={"parallel": ParallelConfig()})
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-export-")))
        launcher = await stack.enter_async_context(LocalLauncher(logs))
        policy = await stack.enter_async_context(
            PolicyGroup(
                rank_starter(launcher, threads=cpu_count()),
                one,
                base,
                with_reference=False,
                start_deadline_s=config.launch.start_deadline_s,
            )
        )
        await policy.call(LoadRequest(directory=str(checkpoint.policy_directory.absolute())))
        save = SaveAdapterRequest if adapter else SaveHfRequest
        await policy.call(save(directory=str(out)))
