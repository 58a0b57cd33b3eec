"""Validation: samples the validation rows from the present weights, with separate settings."""

import asyncio
from collections.abc import Sequence

from treadle.agent_loop import AgentTask
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Prompt
from treadle.trainer.report import validation_metrics
from treadle.trainer.report.failures import causes
from treadle.trainer.training_loop.context import Timer, TrainingContext

__all__ = ["validate", "validation_tasks"]


def validation_tasks(config: Config, prompts: Sequence[Prompt]) -> list[AgentTask]:
    """Returns the tasks of a validation: `rollout.val.samples_per_prompt` per row, adjacent.

    The seeds do not depend on the step, so that a change in the numbers is a change of the model.
    """
    samples, seed = config.rollout.val.samples_per_prompt, config.run.seed
    return [task for prompt in prompts for task in prompt.tasks(samples=samples, seed=seed, step=0)]


async def validate(context: TrainingContext, *, step: int, timer: Timer) -> dict[str, float]:
    """Returns the metrics of one validation; its trajectories go to the log."""
    tasks = validation_tasks(context.config, context.val)
    with timer.phase("validate"):
        sampled = await context.sample("validate", tasks, step=step)
    trajectories = sampled.trajectories
    await context.record.validated(step, sampled)
    context.rollout.check_outages(trajectories)
    # Intervals of a thousand rows take a second, which the event loop does not have.
    metrics = await asyncio.to_thread(validation_metrics, trajectories)
    if failed := metrics["val/num_failed"]:
        text = f"{failed:.0f} of {len(trajectories)} trajectories of the validation failed"
        context.record.note(step, "\n  ".join([text, *causes(trajectories)]))
    return metrics
