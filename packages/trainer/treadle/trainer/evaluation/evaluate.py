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
from treadle.trainer.evaluation.check import CheckedEvaluation
from treadle.trainer.evaluation.group_log import GroupLog
from treadle.trainer.evaluation.results import RESULTS, Results, make_results
from treadle.trainer.launch.make_launcher import make_launcher
from treadle.trainer.launch.process import Launcher
from treadle.trainer.report import (
    MetricsLog,
    NotesLog,
    live_report,
    open_progress,
    validation_metrics,
)
from treadle.trainer.report.prometheus import RunMetrics
from treadle.trainer.rollout.attached_server import AttachedServer
from treadle.trainer.rollout.chat_api.model import ApiServers
from treadle.trainer.rollout.loops_from_config import sampling_params
from treadle.trainer.rollout.open_rollout import make_requirements, open_own_code, open_rollout
from treadle.trainer.rollout.rollout import Rollout
from treadle.trainer.rollout.server_pool import ServerPool
from treadle.trainer.rollout.server_process import server_traces
from treadle.trainer.rollout.server_security import with_own_secrets
from treadle.trainer.tracing.run_tracing import run_tracing, span_attributes
from treadle.trainer.training_loop.context import Timer
from treadle.trainer.training_loop.run_log import run_log
from treadle.trainer.training_loop.run_record import RunRecord, Sampled
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
        metrics = RunMetrics(project=config.run.project, name=config.run.name)  # served to nobody
        record = RunRecord(display, metrics, total_steps=None)
        with record.phase("start"):
            # A server that does not answer or fit is found before anything is written.
            attached = await _attach(stack, checked)
            directory = stack.enter_context(RunDirectory(out))
            directory.write_config(checked.given.model_dump(mode="json"))
            stack.enter_context(run_log(out / "logs" / "evaluation.log", display))
            await stack.enter_async_context(run_tracing(config, out, record.show))
            await stack.enter_async_context(live_report(out, curves=False))
            record.on_note.append(NotesLog(out / "notes.jsonl").append)
            await open_own_code(stack, config, checked.inputs)
            launcher = make_launcher(config, out / "logs")
            if attached is None or config.agent.num_workers:
                await stack.enter_async_context(launcher)
            secured = config
            if attached is None:
                secured = stack.enter_context(with_own_secrets(config, out, launcher.tls))
            servers = attached or await _start(stack, checked, launcher, secured)
            rollout, _ = await open_rollout(
                stack,
                config,
                checked.inputs,
                launcher=launcher,
                secured=secured,
                servers=servers,
                requirements=_requirements(checked),
            )
        for line in _plan(checked, servers):
            record.show(line)
        step = source.step if source.step is not None else _weight_version(servers)
        timer = Timer()
        with timer.phase("validate"):
            trajectories = await _sample(
                checked, rollout, record, step=step, min_weight_version=_weight_version(servers)
            )
        results = make_results(
            config, source, trajectories, servers=servers.generator.servers, began=began
        )
        with MetricsLog(out / "metrics.jsonl") as log:
            log.append(step, {**validation_metrics(trajectories), **timer.seconds})
        write_json(out / RESULTS, results.record)
    return results


async def _attach(
    stack: contextlib.AsyncExitStack, checked: CheckedEvaluation
) -> ApiServers | AttachedServer | None:
    """Returns the servers that run already; None if the evaluation starts its own."""
    if checked.source.url is not None:
        model = checked.source.api_model
        assert checked.api_renderer is not None
        assert model is not None
        api = ApiServers(checked.source.url, model, checked.api_renderer)
        return await stack.enter_async_context(api)
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


def _requirements(checked: CheckedEvaluation) -> Requirements:
    return make_requirements(checked.config, checked.inputs, {"sampled_logprobs"})


async def _sample(
    checked: CheckedEvaluation,
    rollout: Rollout,
    record: RunRecord,
    *,
    step: int,
    min_weight_version: int,
) -> list[Trajectory]:
    """Returns one scored trajectory per task; shows failures at once, and logs whole groups."""
    config, inputs = checked.config, checked.inputs
    tasks = validation_tasks(config, inputs.val)
    async with record.keep_trajectories(config.run, checked.out, decode=inputs.renderer.decode):
        log = record.trajectory_log
        groups = GroupLog(log, samples=config.rollout.val.samples_per_prompt, step=step)

        def ended(trajectory: Trajectory) -> None:
            record.advance()
            record.firsts(step, [trajectory])
            if not rollout.compares:
                groups.add(trajectory)

        with (
            record.phase("evaluate", total=len(tasks)),
            groups.recording(),
            log.recording() as recorded,
            span_attributes(config, tasks, step=step, validate=True),
        ):
            trajectories = await rollout.run(
                tasks,
                sampling_params(config, "validate"),
                min_weight_version=min_weight_version,
                on_end=ended,
            )
            for trajectory in trajectories if rollout.compares else ():
                groups.add(trajectory)
        sampled = Sampled(trajectories=trajectories, spans=recorded.spans)
        record.hold(step, sampled, phase="val", limit=config.run.val_trajectories)
    rollout.check_outages(trajectories)
    return trajectories


def _weight_version(servers: ApiServers | AttachedServer | ServerPool) -> int:
    """Returns the version that the servers served when they were connected."""
    return min(server.weight_version for server in servers.generator.servers)


def _plan(
    checked: CheckedEvaluation, servers: ApiServers | AttachedServer | ServerPool
) -> Iterator[str]:
    """Yields what is about to happen, in a few lines."""
    source, config = checked.source, checked.config
    val = config.rollout.val
    yield f"results    {checked.out}"
    if source.url is not None:
        yield f"model      {source.api_model} at {source.url}"
    elif source.address is None:
        of_run = "" if source.run is None else f" (step {source.step} of {source.run})"
        yield f"model      {config.model.path}{of_run}"
    else:
        yield f"tokenizer  {config.model.path}"
    for server in servers.generator.servers if source.url is None else ():
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
