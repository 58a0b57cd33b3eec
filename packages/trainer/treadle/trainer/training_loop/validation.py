"""Validation: the held-out rows, with sampling settings of their own, on the present weights."""

from treadle.trainer.report import validation_metrics
from treadle.trainer.training_loop.context import Run, Timer

__all__ = ["validate"]


async def validate(run: Run, *, step: int, timer: Timer) -> dict[str, float]:
    """The metrics of one validation; its trajectories go to the log.

    The seeds do not depend on the step, so that a change of the numbers is a change of the model.
    """
    samples, seed = run.config.rollout.val.samples_per_prompt, run.config.run.seed
    tasks = [
        task for prompt in run.val for task in prompt.tasks(samples=samples, seed=seed, step=0)
    ]
    with timer.phase("validate"):
        trajectories = await run.sample("val", step, tasks)
    metrics = validation_metrics(trajectories)
    if failed := metrics["val/num_failed"]:
        run.progress.note(f"validation at step {step}: {failed:.0f} trajectories failed")
    return metrics
