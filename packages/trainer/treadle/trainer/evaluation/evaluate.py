"""The evaluation: from a configuration and a source to a directory of results.

Invariant: when `evaluate` returns or raises, every process that it started has ended. The directory
has `results.json` only if each task of each row was attempted; `trajectories.jsonl` holds every row
whose trajectories have ended.
"""

import asyncio
import contextlib
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from treadle.agent_loop import SetupError, Trajectory
from treadle.agent_loop.rpc import Requirements
from treadle.trainer.checkpoint.run_directory import RunDirectory, write_json
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Row, check_rows
from treadle.trainer.data.load_data import Inputs, Rows, prepare
from treadle.trainer.evaluation.group_log import GroupLog
from treadle.trainer.evaluation.results import RESULTS, Results, make_results
from treadle.trainer.evaluation.source import Source
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.model_source import with_local_model
from treadle.trainer.report import (
    MetricsLog,
    NotesLog,
    Progress,
    TrajectoryLog,
    live_report,
    open_progress,
    validation_metrics,
)
from treadle.trainer.report.logged_progress import LoggedProgress
from treadle.trainer.rollout.attached_server import AttachedServer
from treadle.trainer.rollout.loops_from_config import prompt_rules, sampling_params
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.server_process import check_server_command
from treadle.trainer.rollout.server_security import with_own_token
from treadle.trainer.training_loop.first_of_kind import FirstOfKind
from treadle.trainer.training_loop.run_log import run_log, run_tracing
from treadle.trainer.training_loop.validation import validation_tasks

__all__ = ["EvaluationError", "evaluate"]


class EvaluationError(RuntimeError):
    """The evaluation cannot begin; the message names the cause, the value and the fix."""


async def evaluate(config: Config, source: Source, rows: Sequence[Row], out: Path) -> Results:
    """Samples and scores every row; returns the results, which are also in `out`.

    Args:
        config: As `load_settings` gives it.
        source: What is evaluated.
        rows: Of `config.data.val_files`.
        out: Where everything is written; absent or empty.

    Raises:
        EvaluationError: `out` is not empty.
        DataError: A row names something that does not exist.
        ConfigError: The engine's environment does not exist.
        SetupError: The model, or something that the configuration names, cannot be used, or the
            server does not answer or does not fit.
        RunDirectoryError: `out` cannot be written.
        ProcessError: A server did not start.
        NoServerLeftError: No server is left.
    """
    _check_place(out)
    began = datetime.datetime.now().astimezone()
    given = config
    config = await asyncio.to_thread(with_local_model, given, weights=source.address is None)
    rules = prompt_rules(config)
    check_rows(rows, split="val", rules=rules)
    if source.address is None:
        check_server_command(config)
    async with contextlib.AsyncExitStack() as stack:
        display = stack.enter_context(open_progress(total_steps=None))
        progress = LoggedProgress(display, total_steps=0)
        with progress.phase("start"):
            # What is wrong with the rows or the address is found before anything is written.
            every = Rows(train=(), val=rows)
            inputs = await asyncio.to_thread(prepare, config, every, rules)
            attached = await _attach(stack, config, source.address, inputs)
            stack.enter_context(RunDirectory(out)).write_config(given.model_dump(mode="json"))
            stack.enter_context(run_log(out / "logs" / "evaluation.log", display))
            stack.enter_context(run_tracing(config, out))
            await stack.enter_async_context(live_report(out, curves=False))
            servers = attached or await _start(stack, config, out, inputs)
        for line in _plan(config, source, inputs, servers, out):
            progress.note(line)
        step = source.step if source.step is not None else _weight_version(servers)
        trajectories = await _sample(config, inputs, servers, progress, out, step=step)
        results = make_results(
            config, source, trajectories, servers=servers.generator.servers, began=began
        )
        with MetricsLog(out / "metrics.jsonl") as log:
            log.append(step, validation_metrics(trajectories))
        write_json(out / RESULTS, results.record)
    return results


def _check_place(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EvaluationError(f"{out} is not empty: choose another place with --out, or remove it")


async def _attach(
    stack: contextlib.AsyncExitStack, config: Config, address: str | None, inputs: Inputs
) -> AttachedServer | None:
    if address is None:
        return None
    server = await stack.enter_async_context(AttachedServer(address, config))
    try:
        await server.connect(_requirements(config, inputs))
    except SetupError as error:
        error.add_note(f"prompts are rendered with the tokenizer of model.path={config.model.path}")
        raise
    return server


async def _start(
    stack: contextlib.AsyncExitStack, config: Config, out: Path, inputs: Inputs
) -> ServerPool:
    launcher = await stack.enter_async_context(make_launcher(config, out / "logs"))
    secured = stack.enter_context(with_own_token(config, out))
    servers = await stack.enter_async_context(ServerPool(launcher, secured))
    await servers.connect(_requirements(config, inputs))
    return servers


def _requirements(config: Config, inputs: Inputs) -> Requirements:
    return Requirements(
        tokenizer_sha256=inputs.renderer.tokenizer_sha256,
        vocab_size=inputs.renderer.vocab_size,
        context_length=config.rollout.context_length,
    )


async def _sample(
    config: Config,
    inputs: Inputs,
    servers: AttachedServer | ServerPool,
    progress: Progress,
    out: Path,
    *,
    step: int,
) -> list[Trajectory]:
    """Returns one scored trajectory per task; shows failures at once, and logs whole groups."""
    tasks = validation_tasks(config, inputs.val)
    seen, notes = FirstOfKind(), NotesLog(out / "notes.jsonl")
    rollout = Rollout(
        config=config,
        servers=servers,
        renderer=inputs.renderer,
        rules=inputs.rules,
        reward=inputs.reward,
    )
    with TrajectoryLog(out / "trajectories.jsonl", decode=inputs.renderer.decode) as log:
        groups = GroupLog(log, samples=config.rollout.val.samples_per_prompt, step=step)

        def ended(trajectory: Trajectory) -> None:
            progress.advance()
            for text in seen.take([trajectory]):
                progress.note(text)
                notes.append(step, text)
            groups.add(trajectory)

        with progress.phase("evaluate", total=len(tasks)), groups.recording():
            return await rollout.run(
                tasks,
                sampling_params(config, "val"),
                min_weight_version=_weight_version(servers),
                on_end=ended,
            )


def _weight_version(servers: AttachedServer | ServerPool) -> int:
    """Returns the version that the servers served when they were connected."""
    return min(server.weight_version for server in servers.generator.servers)


def _plan(
    config: Config,
    source: Source,
    inputs: Inputs,
    servers: AttachedServer | ServerPool,
    out: Path,
) -> Iterator[str]:
    """Yields what is about to happen, in a few lines."""
    val, files = config.rollout.val, ", ".join(map(str, config.data.val_files))
    yield f"results    {out}"
    if source.address is None:
        of_run = "" if source.run is None else f" (step {source.step} of {source.run})"
        yield f"model      {config.model.path}{of_run}"
    else:
        yield f"tokenizer  {config.model.path}"
    for server in servers.generator.servers:
        yield (
            f"server     {server.address}: {server.architecture} with {server.engine} "
            f"{server.engine_version}, weight version {server.weight_version}"
        )
    yield f"data       {files}"
    yield (
        f"samples    {len(inputs.val)} rows x {val.samples_per_prompt} at temperature "
        f"{val.temperature:g}, seed {config.run.seed}"
    )
    for note in (*source.notes, *inputs.notes):
        yield f"note: {note}"
