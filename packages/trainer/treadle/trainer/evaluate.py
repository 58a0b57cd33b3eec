"""Validation: the held-out rows, with sampling settings of their own, on the present weights."""

from treadle.trainer.flow.run import Run, Timer, sampling_params
from treadle.trainer.report import validation_metrics

__all__ = ["validate"]


async def validate(run: Run, *, step: int, timer: Timer) -> dict[str, float]:
    """The metrics of one validation; its trajectories go to the log.

    The seeds do not depend on the step, so that a change of the numbers is a change of the model.
    """
    config = run.config
    val = config.rollout.val
    tasks = [
        task
        for prompt in run.val
        for task in prompt.tasks(samples=val.samples_per_prompt, seed=config.run.seed, step=0)
    ]
    sampling = sampling_params(
        config, temperature=val.temperature, top_p=val.top_p, top_k=val.top_k
    )
    with timer.phase("validate"), run.trajectory_log.recording() as recorded:
        trajectories = await run.sample("validate", tasks, sampling)
    run.trajectory_log.append(
        step,
        trajectories,
        phase="val",
        limit=config.run.val_trajectories,
        spans=recorded.spans,
    )
    metrics = validation_metrics(trajectories)
    if failed := metrics["val/num_failed"]:
        run.progress.note(f"validation at step {step}: {failed:.0f} trajectories failed")
    return metrics
