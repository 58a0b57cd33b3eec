"""The evaluation: from a configuration and a source to a directory of results.

Invariant: when `evaluate` returns or raises, every process that it started has ended. The directory
has `results.json` only if each task of each row was attempted; `trajectories.jsonl` holds every row
whose trajectories have ended, and `trajectories/` all of them once the last one has.
"""

import contextlib
import datetime
from collections.abc import Iterator

from treadle.agent_loop import SetupError, Trajectory
from treadle.agent_loop.rpc import Requirements
from treadle.trainer.checkpoint.run_directory import RunDirectory, write_json
from treadle.trainer.config.schema import Config
from treadle.trainer.data.load_data import enter_reward
from treadle.trainer.evaluation.check import CheckedEvaluation
from treadle.trainer.evaluation.group_log import GroupLog
from treadle.trainer.evaluation.results import RESULTS, Results, make_results
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.process import Launcher
from treadle.trainer.report import (
    MetricsLog,
    NotesLog,
    Progress,
    TrajectoryLog,
    live_report,
    open_progress,
    validation_metrics,
)
from treadle.trainer.report.terminal.logged_progress import LoggedProgress
from treadle.trainer.rollout.attached_server import AttachedServer
from treadle.trainer.rollout.loops_from_config import sampling_params
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.server_process import server_traces
from treadle.trainer.rollout.server_security import with_own_secrets
from treadle.trainer.rollout.workers.pool import LoopWorkers, loop_workers
from treadle.trainer.tracing.run_tracing import run_tracing, span_attributes
from treadle.trainer.training_loop.context import Timer
from treadle.trainer.training_loop.first_of_kind import FirstOfKind
from treadle.trainer.training_loop.run_log import run_log
from treadle.trainer.training_loop.trajectory_store import TrajectoryStore
from treadle.trainer.training_loop.validation import validation_tasks

__all__ = ["evaluate"]


async def evaluate(checked: CheckedEvaluation) -> Results:
    """Samples and scores every row; returns the results, which are also in the directory.

    Raises:
        SetupError: A server does not answer or does not fit.
        RunDirectoryError: The directory cannot be written.
        ProcessError: A server did not start.
        NoServerLeftError: No server is left.
        OutageError: Something else is down that the trajectories need.
    """
    began = datetime.datetime.now().astimezone()
    source, config, out = checked.source, checked.config, checked.out
    async with contextlib.AsyncExitStack() as stack:
        display = stack.enter_context(open_progress(total_steps=None))
        progress = LoggedProgress(display, total_steps=0)
        with progress.phase("start"):
            # A server that does not answer or fit is found before anything is written.
            attached = await _attach(stack, checked)
            directory = stack.enter_context(RunDirectory(out))
            directory.write_config(checked.given.model_dump(mode="json"))
            stack.enter_context(run_log(out / "logs" / "evaluation.log", display))
            await stack.enter_async_context(run_tracing(config, out, progress.note))
            await stack.enter_async_context(live_report(out, curves=False))
            if not config.agent.num_workers:  # which open their own
                await enter_reward(stack, checked.inputs.reward)
                loops = checked.inputs.rules.loops
                await stack.enter_async_context(loops.opened(checked.inputs.loops))
            launcher = make_launcher(config, out / "logs")
            if attached is None or config.agent.num_workers:
                await stack.enter_async_context(launcher)
            secured = config
            if attached is None:
                secured = stack.enter_context(with_own_secrets(config, out, launcher.tls))
            servers = attached or await _start(stack, checked, launcher, secured)
            workers = await _start_workers(stack, checked, launcher, secured, servers)
        for line in _plan(checked, servers):
            progress.note(line)
        step = source.step if source.step is not None else _weight_version(servers)
        timer = Timer()
        with timer.phase("validate"):
            trajectories = await _sample(checked, servers, workers, progress, step=step)
        results = make_results(
            config, source, trajectories, servers=servers.generator.servers, began=began
        )
        with MetricsLog(out / "metrics.jsonl") as log:
            log.append(step, {**validation_metrics(trajectories), **timer.seconds})
        write_json(out / RESULTS, results.record)
    return results


async def _attach(
    stack: contextlib.AsyncExitStack, checked: CheckedEvaluation
) -> AttachedServer | None:
    if checked.source.address is None:
        return None
    server = AttachedServer(checked.source.address, checked.config)
    await stack.enter_async_context(server)
    try:
        await server.connect(_requirements(checked))
    except SetupError as error:
        error.add_note(
            f"it must serve the model of model.path={checked.given.model.path}, with whose "
            "tokenizer prompts are rendered"
        )
        raise
    return server


async def _start(
    stack: contextlib.AsyncExitStack,
    checked: CheckedEvaluation,
    launcher: Launcher,
    secured: Config,
) -> ServerPool:
    traces = server_traces(checked.config, checked.out)
    servers = await stack.enter_async_context(ServerPool(launcher, secured, traces=traces))
    await servers.connect(_requirements(checked))
    return servers


async def _start_workers(
    stack: contextlib.AsyncExitStack,
    checked: CheckedEvaluation,
    launcher: Launcher,
    secured: Config,
    servers: AttachedServer | ServerPool,
) -> LoopWorkers | None:
    """Returns the loop workers; None if there are none."""
    if not secured.agent.num_workers:
        return None
    workers, router = await stack.enter_async_context(
        loop_workers(
            launcher,
            secured,
            servers=servers.live,
            requirements=_requirements(checked),
            loops=checked.inputs.loops,
            images=checked.inputs.images,
        )
    )
    if isinstance(servers, ServerPool):
        router.follow(servers)
    return workers


def _requirements(checked: CheckedEvaluation) -> Requirements:
    renderer, shown = checked.inputs.renderer, checked.inputs.images
    return Requirements(
        tokenizer_sha256=renderer.tokenizer_sha256,
        vocab_size=renderer.vocab_size,
        context_length=checked.config.rollout.context_length,
        capabilities=frozenset({"sampled_logprobs", *(("images",) if shown else ())})
        | checked.inputs.rules.loops.required_capabilities(checked.inputs.loops),
    )


async def _sample(
    checked: CheckedEvaluation,
    servers: AttachedServer | ServerPool,
    workers: LoopWorkers | None,
    progress: Progress,
    *,
    step: int,
) -> list[Trajectory]:
    """Returns one scored trajectory per task; shows failures at once, and logs whole groups."""
    config, inputs = checked.config, checked.inputs
    tasks = validation_tasks(config, inputs.val)
    seen, notes = FirstOfKind(), NotesLog(checked.out / "notes.jsonl")
    rollout = Rollout(
        config=config,
        servers=servers,
        renderer=inputs.renderer,
        rules=inputs.rules,
        reward=inputs.reward,
        workers=workers,
    )
    path, decode = checked.out / "trajectories.jsonl", inputs.renderer.decode
    with TrajectoryLog(path, decode=decode) as log:
        groups = GroupLog(log, samples=config.rollout.val.samples_per_prompt, step=step)

        def ended(trajectory: Trajectory) -> None:
            progress.advance()
            for text in seen.take([trajectory]):
                progress.note(text)
                notes.append(step, text)
            groups.add(trajectory)

        with (
            progress.phase("evaluate", total=len(tasks)),
            groups.recording(),
            log.recording() as recorded,
            span_attributes(config, tasks, step=step, validate=True),
        ):
            trajectories = await rollout.run(
                tasks,
                sampling_params(config, "validate"),
                min_weight_version=_weight_version(servers),
                on_end=ended,
            )
    run = config.run
    async with TrajectoryStore(
        checked.out, decode=decode, max_bytes=run.trajectories_max_bytes
    ) as store:
        limit, spans = run.val_trajectories, recorded.spans
        if said := store.hold(step, trajectories, phase="val", limit=limit, spans=spans):
            progress.note(said)
            notes.append(step, said)
    rollout.check_outages(trajectories)
    return trajectories


def _weight_version(servers: AttachedServer | ServerPool) -> int:
    """Returns the version that the servers served when they were connected."""
    return min(server.weight_version for server in servers.generator.servers)


def _plan(checked: CheckedEvaluation, servers: AttachedServer | ServerPool) -> Iterator[str]:
    """Yields what is about to happen, in a few lines."""
    source, config = checked.source, checked.config
    val = config.rollout.val
    yield f"results    {checked.out}"
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
    yield f"data       {', '.join(map(str, config.data.val_files))}"
    yield (
        f"samples    {len(checked.inputs.val)} rows x {val.samples_per_prompt} at temperature "
        f"{val.temperature:g}, seed {config.run.seed}"
    )
    for note in checked.inputs.notes:
        yield f"note: {note}"
