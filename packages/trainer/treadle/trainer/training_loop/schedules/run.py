"""Runs a schedule by the name that `schedule.kind` gives it."""

from treadle.trainer.config.schema import ScheduleConfig
from treadle.trainer.training_loop.context import TrainingContext
from treadle.trainer.training_loop.schedules.beside_training import run_beside_training
from treadle.trainer.training_loop.schedules.group_queue import Rule
from treadle.trainer.training_loop.schedules.rules import AsyncRule, OverlapRule, StreamRule
from treadle.trainer.training_loop.schedules.sync import run_sync

__all__ = ["run_schedule"]


async def run_schedule(context: TrainingContext, *, first_step: int) -> None:
    """Trains steps `first_step` to `context.total_steps`.

    Raises:
        Exception: See `run_sync`.
    """
    rule = _rule(context.config.schedule)
    if rule is None:
        await run_sync(context, first_step=first_step)
    else:
        await run_beside_training(context, rule, first_step=first_step)


def _rule(schedule: ScheduleConfig) -> Rule | None:
    """Returns the rule of a schedule whose rollouts run beside training; None: they do not."""
    match schedule.kind:
        case "sync":
            return None
        case "overlap":
            return OverlapRule()
        case "stream":
            return StreamRule(schedule.surplus)
        case "async":
            return AsyncRule(schedule.max_staleness)
