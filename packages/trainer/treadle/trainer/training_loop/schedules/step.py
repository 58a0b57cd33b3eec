"""The moves of a step that all schedules share: what becomes of the groups that it trains on.

Each step: reward, advantage, update, weight sync, validation, checkpoint. The model of the
checkpoint is written after the update already.

Invariant: when `train_step` returns, the servers of the rotation sample from version `step`, and
the step is logged.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from treadle.policy.algorithms.estimators import AdvantageError
from treadle.policy.algorithms.reward_kl import Charges, coefficient_after
from treadle.policy.client.types import TokenValues
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.trainer.checkpoint.run_directory import Best
from treadle.trainer.report import rollout_metrics
from treadle.trainer.report.metrics import VAL_REWARD
from treadle.trainer.rollout.outages import OwnCodeError, check_own_code
from treadle.trainer.training_loop.context import Timer, TrainingContext
from treadle.trainer.training_loop.gather import StepGroups
from treadle.trainer.training_loop.groups import NoGroupLeftError, StepBatch, survivors_of
from treadle.trainer.training_loop.update_metrics import critic_metrics, update_metrics
from treadle.trainer.training_loop.validation import validate

__all__ = [
    "GroupsBesideTraining",
    "save_interrupted",
    "steps_of",
    "train_step",
    "validate_before_training",
]


class GroupsBesideTraining(Protocol):
    """The groups that are sampled while a step trains, as its moves need them."""

    def published(self, version: int) -> None:
        """The servers have the weights of a step."""
        ...

    async def kept_in_checkpoint(self) -> Mapping[str, object]:
        """Returns what the checkpoint of the step that was published has of the groups."""
        ...

    def checkpointed(self, step: int) -> None:
        """The checkpoint of a step is complete."""
        ...


async def validate_before_training(context: TrainingContext, *, first_step: int) -> None:
    """Validates the weights that the run begins with, if it begins and is to validate.

    From its end on the time shares are of a step each. Those of step 0 are of the validation, and
    of the ranks since they started; without it there is no step 0, and nothing to log them with.
    """
    await context.server_shares.take({})
    if first_step == 1 and context.val and context.config.schedule.val_before_train:
        timer = Timer()
        metrics = await validate(context, step=0, timer=timer)
        metrics |= {**context.servers.take_metrics(), **context.rollout.take_metrics()}
        metrics |= await context.time_shares(timer.seconds)
        await context.record.step(0, {**metrics, **timer.seconds})
    else:
        await context.time_shares({})


async def train_step(
    context: TrainingContext,
    step: int,
    found: StepGroups,
    timer: Timer,
    beside: GroupsBesideTraining | None = None,
) -> None:
    """Trains on the groups of a step, gives the servers the new weights, and logs the step.

    Args:
        timer: Has the time of the step so far.
        beside: The groups that are sampled meanwhile; None: none are.

    Raises:
        AdvantageError: The estimator failed.
        NoGroupLeftError: Failures left nothing to train on.
        OwnCodeError: A bug of the user's failed too many trajectories.
        Exception: See `run_sync`.
    """
    config = context.config
    await _begin_step(context, step, found, timer)
    batch, charges = await _batch_of(context, step, found, timer)
    await context.log_training(step, found.sampled, batch)
    _report_failures(context, step, batch)
    if text := context.room.too_long(batch.sequences):
        context.record.note(step, text)

    updated, tokens = await _update(context, step, batch, timer)
    await context.record.trajectory_store.write(tokens)

    # The model is written before the servers that share devices with it take their memory back.
    last, schedule = step == context.total_steps, config.schedule
    saved = schedule.saves(step, last=last) or schedule.is_time_to_save(
        context.checkpoints.saved_at
    )
    if saved:
        with timer.phase("save"):
            await context.save_model(step, with_hf=schedule.saves_hf(step, last=last))

    # Weight sync: from here on the servers sample from version `step`.
    with timer.phase("sync"):
        sync_metrics = await context.sync_weights(step)
    if beside is not None:
        beside.published(step)
    metrics = {
        **rollout_metrics(found.trajectories),
        **batch.metrics(),
        **charges.metrics,
        **updated,
        "weights/version": float(context.version),
        "run/resumes": float(context.record.resumes),
        **sync_metrics,
        **await context.offload_metrics(),
        "data/epoch": float(context.order.epoch(context.batches)),
        **found.metrics,
    }
    context.kl_coef = coefficient_after(config.algorithm.reward_kl, metrics)

    await _end_step(context, step, metrics, timer, beside, saved=saved)


async def _begin_step(context: TrainingContext, step: int, found: StepGroups, timer: Timer) -> None:
    """Looks for bugs of the user's; then the policy may change."""
    try:
        limit = context.config.agent.max_failed_share
        check_own_code(found.trajectories, step=step, limit=limit)
    except OwnCodeError:
        await context.log_training(step, found.sampled, None)
        raise
    context.unsaved = None
    # From here to the weight sync, servers that share devices with the policy lend it their memory.
    if context.config.rollout.release_memory:
        with timer.phase("release"):
            await context.release_memory()


async def _end_step(
    context: TrainingContext,
    step: int,
    metrics: dict[str, float],
    timer: Timer,
    beside: GroupsBesideTraining | None,
    *,
    saved: bool,
) -> None:
    """Validates, completes the checkpoint, and logs the step."""
    last = step == context.total_steps
    if context.val and context.config.schedule.validates(step, last=last):
        metrics |= await validate(context, step=step, timer=timer)
    metrics |= {**context.servers.take_metrics(), **context.rollout.take_metrics()}

    # Checkpoint: it carries the metrics, so that a resumed run can restore this step's line.
    if saved:
        with timer.phase("save"):
            groups = None if beside is None else await beside.kept_in_checkpoint()
            await context.complete_checkpoint(step, {**metrics, **timer.metrics()}, groups)
        _choose_best(context, step, metrics)
        if beside is not None:
            beside.checkpointed(step)
    metrics |= await context.time_shares(timer.seconds)
    if not saved:
        context.unsaved = step, {**metrics, **timer.metrics()}
    await context.record.step(step, {**metrics, **timer.metrics()})


def _choose_best(context: TrainingContext, step: int, metrics: Mapping[str, float]) -> None:
    """Compares a step that has a checkpoint with the best so far."""
    name, checkpoints = context.config.schedule.best, context.checkpoints
    if name is None:
        return
    if (value := metrics.get(name)) is not None:
        best = checkpoints.best
        if best is None or value > best.value:
            checkpoints.set_best(Best(step=step, value=value))
    elif VAL_REWARD in metrics:
        context.record.note(
            step, f"schedule.best={name}: the rewards do not tell right from wrong, so none is best"
        )


def steps_of(context: TrainingContext, first_step: int) -> Iterator[int]:
    """Yields the steps that are left, until the validations are no better for too long."""
    schedule = context.config.schedule
    for step in range(first_step, context.total_steps + 1):
        best = None if schedule.patience is None else context.checkpoints.best
        if best is not None and schedule.is_stuck(step - 1, best.step):
            context.record.note(
                step - 1,
                f"the run ends early: no validation since step {best.step}, with {schedule.best}="
                f"{best.value:.4g}, was better (schedule.patience={schedule.patience})",
            )
            return
        yield step


async def _batch_of(
    context: TrainingContext, step: int, found: StepGroups, timer: Timer
) -> tuple[StepBatch, Charges]:
    """Returns what a step trains on, and what the KL costs it."""
    config = context.config
    # Advantages: rewards minus the KL penalty, relative to the group or to the critic.
    try:
        survivors = survivors_of(found.groups, context.estimator, version=context.version)
        if context.reference is not None:
            with timer.phase("reference"):
                survivors = await context.with_reference(survivors)
        charges = Charges()
        if config.algorithm.reward_kl.coef:
            with timer.phase("kl"):
                survivors, charges = await context.charge(survivors)
        if context.estimator.needs_values:
            with timer.phase("values"):
                survivors = await context.with_values(survivors)
        batch = survivors.batch(context.estimator, charges=charges.of_tokens)
    except (AdvantageError, NoGroupLeftError):
        await context.log_training(step, found.sampled, None)
        raise
    return batch, charges


async def _update(
    context: TrainingContext, step: int, batch: StepBatch, timer: Timer
) -> tuple[dict[str, float], TokenValues | None]:
    """Updates the critic and, after its warm-up, the policy.

    Returns:
        The metrics, and what the policy's update computed of each token; None: there was none.
    """
    config, updated = context.config, dict[str, float]()
    tokens: TokenValues | None = None
    if config.algorithm.needs_critic:
        with timer.phase("critic"):
            taught = await context.update_critic(step, batch.sequences)
        _report_skipped(context, step, taught.steps, "the critic's updates")
        updated |= critic_metrics(taught)
    if not config.algorithm.needs_critic or step > config.critic.warmup_steps:
        with timer.phase("train"):
            stats = await context.update_policy(step, batch.sequences)
        _report_skipped(context, step, stats.steps, "updates")
        updated |= update_metrics(stats)
        tokens = TokenValues.of(stats.tokens)
    return updated, tokens


async def save_interrupted(
    context: TrainingContext, beside: GroupsBesideTraining | None = None
) -> None:
    """Saves the last step of a run that ends early, while its policy is at rest.

    Raises:
        PolicyError: A policy rank failed.
        RunDirectoryError: The checkpoint cannot be written.
    """
    schedule = context.config.schedule
    if context.unsaved is None or not schedule.keeps_checkpoints:
        return
    step, metrics = context.unsaved
    context.record.show(f"the run ends early: saving step {step}; interrupt again to end now")
    if context.config.rollout.release_memory:  # the servers have the memory of the policy
        await context.release_memory()
    await context.save_model(step, with_hf=schedule.save_hf == "every")
    groups = None if beside is None else await beside.kept_in_checkpoint()
    await context.complete_checkpoint(step, metrics, groups)
    if beside is not None:
        beside.checkpointed(step)


def _report_skipped(
    context: TrainingContext, step: int, updates: Sequence[pb.StepStats], what: str
) -> None:
    if skipped := sum(update.skipped for update in updates):
        context.record.note(
            step,
            f"{skipped} of {len(updates)} {what} were skipped, because their gradient was not "
            "finite",
        )


def _report_failures(context: TrainingContext, step: int, batch: StepBatch) -> None:
    if not batch.num_failed:
        return
    text = (
        f"{batch.num_failed} trajectories failed and are left out, with them "
        f"{batch.num_dropped_groups} of {batch.num_groups} groups"
    )
    context.record.note(step, "\n  ".join([text, *batch.causes]))
