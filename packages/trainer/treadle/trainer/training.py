"""Training: from a configuration to a finished run directory.

Invariant: whatever happens, every process that was started has ended when `train` returns or
raises, and the run directory holds a state from which the same call goes on. Everything that can
be wrong with the user's files is found before the first step.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.agent_loop.rpc import Requirements
from treadle.tools import rewards
from treadle.tracing import JsonlSink, use_sink
from treadle.trainer.checkpoint import Checkpoint, Checkpoints, RunDirectory, RunDirectoryError
from treadle.trainer.config.schema import FileTransportConfig, RunConfig
from treadle.trainer.data import DataOrder
from treadle.trainer.flow.run import Run
from treadle.trainer.flow.sync import run_sync
from treadle.trainer.inputs import Inputs, Rows, prepare
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.process import Launcher
from treadle.trainer.plan import Plan, make_plan
from treadle.trainer.policy_commands import Load
from treadle.trainer.policy_group import PolicyGroup
from treadle.trainer.replicas import ReplicaSet
from treadle.trainer.report import (
    MetricsLog,
    Progress,
    Summary,
    TrajectoryLog,
    open_progress,
    write_reports,
)
from treadle.trainer.rollout import Rollout
from treadle.trainer.tasks import together
from treadle.trainer.weight_sync.publisher import WeightPublisher

__all__ = ["train"]

_log = logging.getLogger(__name__)

_IDENTITY = ("data.", "model.", "run.seed", "rollout.samples_per_prompt", "algorithm.kind")
"""What a run cannot change and still be the same run."""


async def train(config: RunConfig, rows: Rows, run_dir: Path) -> Summary:
    """Runs the configuration to its end; what it reached.

    Args:
        config: What to do.
        rows: As `read_all_rows` gives them.
        run_dir: Where everything is written; a run that was begun there is resumed.

    Raises:
        RunDirectoryError: the directory is in use, holds another run, or cannot be written.
        Exception: see `run_sync` and the modules of the pieces.
    """
    plan = make_plan(
        config, num_train_rows=len(rows.train), num_val_rows=len(rows.val), cpus=cpu_count()
    )
    with RunDirectory(run_dir) as directory:
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.schedule.keep_checkpoints)
        changes = _begin_or_resume(directory, config)
        begun = directory.holds_run
        directory.write_config(config.model_dump(mode="json"))
        checkpoint = checkpoints.latest()
        first_step = checkpoint.step + 1 if checkpoint is not None else 1
        with (
            open_progress(total_steps=plan.total_steps, first_step=first_step) as progress,
            _logging(run_dir / "logs" / "trainer.log", progress),
            _tracing(config, run_dir),
        ):
            progress.note(f"run directory  {run_dir}\n{plan.text()}")
            for change in changes:
                progress.note(f"changed since the run began: {change}")
            if checkpoint is not None:
                progress.note(f"resuming after step {checkpoint.step}")
            if first_step <= plan.total_steps:
                logs = _open_logs(run_dir, checkpoint, begun=begun)
                async with contextlib.AsyncExitStack() as stack:
                    run = await _set_up(
                        stack, config, rows, plan, run_dir, checkpoint, checkpoints, logs, progress
                    )
                    await run_sync(run, first_step=first_step)
            else:
                progress.note(f"nothing to train: step {plan.total_steps} has been reached")
        return await asyncio.to_thread(
            write_reports, run_dir, title=f"{config.run.project}: {config.run.name}"
        )


def _begin_or_resume(directory: RunDirectory, config: RunConfig) -> list[str]:
    """Refuses a directory of another run; the settings that changed since this one began."""
    if not directory.holds_run:
        return []
    if config.run.resume == "never":
        raise RunDirectoryError(
            f"run.dir={directory.path} already holds a run and run.resume=never: choose another "
            "directory, or set run.resume=auto to go on with it"
        )
    then, now = _leaves(directory.read_config()), _leaves(config.model_dump(mode="json"))
    changed = [key for key in now if then.get(key) != now[key] and not key.startswith("run.dir")]
    other = [key for key in changed if key.startswith(_IDENTITY)]
    if other:
        raise RunDirectoryError(
            f"run.dir={directory.path} holds another run: "
            + "; ".join(f"{key} was {then.get(key)!r} and is {now[key]!r}" for key in other)
            + ". Choose another directory, or set what the run began with"
        )
    return [f"{key} was {then.get(key)!r} and is {now[key]!r}" for key in changed]


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


@dataclass(frozen=True, slots=True)
class _Logs:
    metrics: MetricsLog
    resume_after: int | None


def _open_logs(run_dir: Path, checkpoint: Checkpoint | None, *, begun: bool) -> _Logs:
    """The metrics log, cut back to the checkpoint; the checkpoint's own line is restored."""
    resume_after = checkpoint.step if checkpoint is not None else (-1 if begun else None)
    log = MetricsLog(run_dir / "metrics.jsonl", resume_after=resume_after)
    if checkpoint is not None and log.last_step < checkpoint.step:
        log.append(checkpoint.step, checkpoint.metrics)
    return _Logs(log, resume_after)


async def _set_up(
    stack: contextlib.AsyncExitStack,
    config: RunConfig,
    rows: Rows,
    plan: Plan,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    checkpoints: Checkpoints,
    logs: _Logs,
    progress: Progress,
) -> Run:
    """Starts everything that a run is made of; the stack ends it."""
    stack.callback(logs.metrics.close)
    weights_directory = _weights_directory(config, run_dir)
    launcher = await stack.enter_async_context(_launcher(config, run_dir / "logs"))
    policy = PolicyGroup(
        launcher,
        config.policy,
        config.model.path,
        with_reference=config.algorithm.needs_reference,
        threads=plan.policy_threads,
        gpus_per_rank=getattr(config.launch, "gpus_per_policy_rank", 0.0),
        start_deadline_s=config.launch.start_deadline_s,
    )
    replicas = ReplicaSet(launcher, config, weights_directory=weights_directory)
    publisher = WeightPublisher(
        policy, config.sync, element_type=config.rollout.dtype, directory=weights_directory
    )
    with progress.phase("start"):
        preparing = asyncio.to_thread(prepare, config, rows)
        starting = [stack.enter_async_context(part) for part in (policy, replicas)]
        inputs, *_ = await together([preparing, *starting])
        assert isinstance(inputs, Inputs)
    for note in inputs.notes:
        progress.note(note)
    version = 0
    if checkpoint is not None:
        await policy.call(Load(directory=checkpoint.policy_directory))
        version = checkpoint.step
    trajectory_log = TrajectoryLog(
        run_dir / "trajectories.jsonl",
        decode=inputs.renderer.decode,
        resume_after=logs.resume_after,
    )
    stack.callback(trajectory_log.close)

    async def republish(names: Sequence[str]) -> None:
        progress.note(f"started again: {', '.join(names)}")
        if run.version:  # version 0 is what servers load from the model directory
            clients = [replica.client for replica in replicas.live if replica.name in names]
            report = await publisher.publish(run.version, clients)
            for name, cause in report.failed.items():
                await replicas.drop(name, cause)

    run = Run(
        config=config,
        train=inputs.train,
        val=inputs.val,
        order=DataOrder(
            num_rows=len(inputs.train),
            batch_size=config.data.prompts_per_step,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
        ),
        total_steps=plan.total_steps,
        version=version,
        policy=policy,
        replicas=replicas,
        rollout=Rollout(
            config=config,
            replicas=replicas,
            renderer=inputs.renderer,
            requirements=Requirements(
                tokenizer_sha256=inputs.renderer.tokenizer_sha256,
                vocab_size=inputs.renderer.vocab_size,
                context_length=config.rollout.context_length,
            ),
            tools=inputs.tools,
            reward=rewards.resolve(config.reward.name, mode=config.reward.mode),
            republish=republish,
        ),
        publisher=publisher,
        checkpoints=checkpoints,
        metrics_log=logs.metrics,
        trajectory_log=trajectory_log,
        progress=progress,
    )
    if version:
        await run.publish(version)
    return run


def _weights_directory(config: RunConfig, run_dir: Path) -> Path:
    transport = config.sync.transport
    given = transport.directory if isinstance(transport, FileTransportConfig) else None
    return (given or run_dir / "weights").resolve()


def _launcher(config: RunConfig, logs: Path) -> Launcher:
    if config.launch.kind == "local":
        return LocalLauncher(logs)
    from treadle.trainer.launch.ray import RayLauncher

    return RayLauncher(config.launch, logs)


@contextlib.contextmanager
def _tracing(config: RunConfig, run_dir: Path) -> Iterator[None]:
    if config.tracing.backend == "none":
        yield
        return
    with JsonlSink(run_dir / "traces.jsonl") as sink, use_sink(sink):
        yield


class _Notes(logging.Handler):
    """Shows warnings in the progress display."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(record.getMessage())


@contextlib.contextmanager
def _logging(path: Path, progress: Progress) -> Iterator[None]:
    """Sends what our modules log to a file, and their warnings to the display too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path, encoding="utf-8")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    handlers = [to_file, _Notes(progress)]
    ours = logging.getLogger("treadle")
    level, propagate = ours.level, ours.propagate
    ours.setLevel(logging.INFO)
    ours.propagate = False
    for handler in handlers:
        ours.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            ours.removeHandler(handler)
        to_file.close()
        ours.setLevel(level)
        ours.propagate = propagate
