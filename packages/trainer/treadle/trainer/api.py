"""The Python API: trains from a script or a notebook, with the user's own objects.

    from treadle.trainer import Config, train

    def score(trajectory):
        return float(trajectory.final_text == trajectory.task.fields["extra_info"]["answer"])

    config = Config(model={"path": "my_model"}, data={"train_files": ["train.jsonl"]})
    result = train(config, reward=score, on_step=lambda step, metrics: print(step, metrics))
    print(result.model)

It is the command line's way without the command line: the same checks, files and results.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from treadle.agent_loop import AgentLoop, Tool, ToolFunction
    from treadle.trainer.config.schema import Config
    from treadle.trainer.own_code import OnStep
    from treadle.trainer.report import Summary

__all__ = ["TrainingResult", "train"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The results of a run.

    Attributes:
        metrics: One mapping per step, in order; also in `run_dir / "metrics.jsonl"`.
        model: The trained model as a Hugging Face directory; None if schedule.save_hf is "never".
    """

    run_dir: Path
    summary: Summary
    metrics: Sequence[Mapping[str, float]]
    model: Path | None


def train(
    config: Config,
    *,
    reward: Callable[..., object] | Sequence[Callable[..., object]] | None = None,
    tools: Sequence[Tool | ToolFunction] = (),
    loops: Mapping[str, AgentLoop | type[AgentLoop]] = MappingProxyType({}),
    on_step: OnStep | None = None,
) -> TrainingResult:
    """Trains to the end of the configuration, and waits for it.

    The objects run in this process, so they need neither a file nor an entry point. A run directory
    that holds a run is resumed, as on the command line; give the same objects again.

    Args:
        reward: Scores a trajectory: `reward(trajectory)`, with columns of the row as further
            parameters, or with those of verl's `compute_score`; `reward(trajectories)` scores those
            of a row at once. Several are added by `reward.weights`. None: that of `reward.name`.
        tools: Typed functions with a docstring, or tools, beside those of `agent.tool_catalogue`.
            Rows reach them through their loop, as with `agent.default_loop="tool_agent"`.
        loops: By the name that rows give in `agent_name`, or that `agent.default_loop` names.
        on_step: Called with (step, metrics) after each step; what it raises ends the run.

    Raises:
        ConfigError: The configuration cannot be carried out on this machine.
        DataError: A row cannot be used.
        SetupError: An object or a name in the configuration cannot be used.
        SeveralProblems: More than one thing is wrong; its `errors` are of the types above.
        RunDirectoryError: The run directory is in use, holds another run, or cannot be written.
        KeyboardInterrupt: It was interrupted; every process has ended, and a run with a checkpoint
            can be resumed.
        Exception: The run failed; see `run_training`.
    """
    from treadle.trainer.checkpoint.run_directory import new_run_dir
    from treadle.trainer.launch.resuming import run_resuming, settings_to_resume
    from treadle.trainer.model_source import exported_model
    from treadle.trainer.own_code import collect
    from treadle.trainer.preflight import check_run
    from treadle.trainer.report import read_metrics
    from treadle.trainer.training_loop.train import run_training

    own = collect(config, reward=reward, tools=tools, loops=loops, on_step=on_step)
    run_dir = config.run.dir or new_run_dir(config.run.name)

    def attempt(losses: Sequence[str]) -> Summary:
        checked = check_run(settings_to_resume(config, losses), run_dir, own, resumes=bool(losses))
        return _wait(run_training(checked, losses=losses))

    summary = run_resuming(attempt, run_dir=run_dir, max_failures=config.launch.max_failures)
    return TrainingResult(
        run_dir=run_dir,
        summary=summary,
        model=exported_model(run_dir),
        metrics=read_metrics(run_dir / "metrics.jsonl"),
    )


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work to its end, also where an event loop runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return _wait_for_thread(work)


def _wait_for_thread(work: Coroutine[Any, Any, T]) -> T:
    """Runs the work in a thread with its own event loop; an interrupt cancels it."""
    started: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()
    ended: concurrent.futures.Future[T] = concurrent.futures.Future()

    async def cancellable() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        started.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await task

    def run() -> None:
        try:
            ended.set_result(asyncio.run(cancellable()))
        except BaseException as error:  # the caller's thread raises it
            ended.set_exception(error)

    thread = threading.Thread(target=run, name="treadle-train")
    thread.start()
    cancel = started.result()
    try:
        return ended.result()
    except KeyboardInterrupt:
        cancel()
        thread.join()  # until every process has ended
        raise
    finally:
        thread.join()
