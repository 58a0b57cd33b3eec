"""The synchronous schedule: rollout, reward, advantage, update, weight sync; then the next step.

Invariant: the weights that sample step s are exactly those after step s - 1, so every token is
on-policy. Trainer and servers take turns; nothing of step s + 1 begins before step s is logged.
Where they share devices, the servers lend their memory between rollout and update (`hand_over`).
Order at the end of a step: publish, validate, checkpoint (which carries the metrics), log. A
trainer that is killed anywhere resumes after the newest checkpoint and repeats what came after,
with the same rows and the same seeds.
"""

from collections.abc import Mapping

from treadle.trainer.policy.commands import UpdateStats
from treadle.trainer.report import rollout_metrics
from treadle.trainer.training_loop.context import Run, Timer
from treadle.trainer.training_loop.groups import StepBatch, make_batch
from treadle.trainer.training_loop.validation import validate

__all__ = ["run_sync", "update_metrics"]


async def run_sync(run: Run, *, first_step: int) -> None:
    """Trains steps `first_step` to `run.total_steps`.

    Raises:
        NoGroupLeftError: a step gave nothing to train on.
        ReplicasLostError: no rollout server is left.
        PolicyError: a policy rank failed.
        WeightSyncError: no server takes new weights.
        RunDirectoryError: a checkpoint cannot be written.
    """
    if first_step == 1 and run.val and run.config.schedule.val_before_train:
        timer = Timer()
        metrics = await validate(run, step=0, timer=timer)
        _log_step(run, 0, {**metrics, **run.replicas.take_metrics(), **timer.seconds})
    for step in range(first_step, run.total_steps + 1):
        await _train_step(run, step)


async def _train_step(run: Run, step: int) -> None:
    config, timer = run.config, Timer()
    tasks = [
        task
        for index in run.order.batch(step)
        for task in run.train[index].tasks(
            samples=config.rollout.samples_per_prompt, seed=config.run.seed, step=step
        )
    ]
    with timer.phase("rollout"):
        trajectories = await run.sample("train", step, tasks)
    batch = make_batch(trajectories, norm_by_std=config.algorithm.norm_by_std, version=run.version)
    _report_losses(run, step, batch)
    if config.rollout.release_memory:
        with timer.phase("release"):
            await run.release_memory()
    with timer.phase("train"):
        stats = await run.train_on(batch.sequences)
    if skipped := sum(update.skipped for update in stats.steps):
        run.progress.note(
            f"step {step}: {skipped} of {len(stats.steps)} updates were skipped, because their "
            "gradient was not finite"
        )
    with timer.phase("sync"):
        sync_metrics = await run.publish(step)
    metrics = {
        **rollout_metrics(trajectories),
        **batch.metrics(),
        **update_metrics(stats),
        "weights/version": float(run.version),
        **sync_metrics,
        "data/epoch": float(run.order.epoch(step)),
    }
    last = step == run.total_steps
    if run.val and _due(config.schedule.val_every, step, last=last):
        metrics |= await validate(run, step=step, timer=timer)
    metrics |= run.replicas.take_metrics()
    if _due(config.schedule.save_every, step, last=last):
        with timer.phase("save"):
            await run.save(step, {**metrics, **timer.metrics()})
    _log_step(run, step, {**metrics, **timer.metrics()})


def _due(every: int | None, step: int, *, last: bool) -> bool:
    return every is not None and (last or step % every == 0)


def _log_step(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    run.metrics_log.append(step, metrics)
    run.progress.step_done(step, metrics)


def _report_losses(run: Run, step: int, batch: StepBatch) -> None:
    if not batch.num_failed:
        return
    run.progress.note(
        f"step {step}: {batch.num_failed} trajectories failed and are left out, with them "
        f"{batch.num_dropped_groups} of {batch.num_groups} groups"
    )
    for cause in batch.causes:
        run.progress.note(f"  {cause}")


def update_metrics(stats: UpdateStats) -> dict[str, float]:
    """Means over the optimizer steps of one batch that have the number; sums of counts.

    `rollout/*`, the difference between engine and trainer, is that of the batch's first moment:
    later steps also show what the batch itself has changed.
    """
    steps = stats.steps
    before = steps[0].metrics if stats.mismatch is None else stats.mismatch
    metrics = {name: value for name, value in before.items() if _is_mismatch(name)}
    for name in sorted({name for step in steps for name in step.metrics}):
        if not _is_mismatch(name):
            values = [step.metrics[name] for step in steps if name in step.metrics]
            metrics[name] = sum(values) / len(values)
    return metrics | {
        "actor/loss": sum(step.loss for step in steps) / len(steps),
        "actor/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "actor/lr": steps[-1].learning_rate,
        "actor/updates": float(len(steps)),
        "actor/skipped_updates": float(sum(step.skipped for step in steps)),
        "actor/micro_batches": float(sum(step.num_micro_batches for step in steps)),
        "tokens/trained": float(sum(step.num_tokens for step in steps)),
        "tokens/loss": float(sum(step.num_loss_tokens for step in steps)),
        "actor/logprobs_s": stats.logprobs_s,
    }


def _is_mismatch(name: str) -> bool:
    return name.startswith("rollout/")
