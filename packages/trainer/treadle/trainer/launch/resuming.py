"""A run that loses a policy rank resumes by itself, up to `launch.max_failures` times.

Invariants: only the loss of a process is answered with another attempt: a rank that was killed or
whose node is gone, one that stands still, an operation that the others could not finish, a process
that is killed or gone with its node while the run starts. What a rank raised by itself would be
raised again, and what is wrong with the input stays wrong. Losses are counted since the latest
checkpoint, so a long run survives any number of them, and one that gets nowhere ends. Each attempt
begins as the same command given again would.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from treadle.policy.client.group import PolicyError
from treadle.trainer.checkpoint.run_directory import CHECKPOINTS, Checkpoints
from treadle.trainer.config.sft import ConfigT
from treadle.trainer.launch.process import LostProcessError

__all__ = ["loss_notes", "run_resuming", "settings_to_resume"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


def run_resuming(attempt: Callable[[Sequence[str]], T], *, run_dir: Path, max_failures: int) -> T:
    """Returns what the first attempt returns that loses no policy rank.

    Args:
        attempt: Runs from the latest checkpoint of `run_dir` to the end. It is given what was lost
            before, in order, and has ended every process that it started when it raises.
        run_dir: Run directory, which need not exist yet.
        max_failures: Number of losses after which the run resumes, without a new checkpoint in
            between.

    Raises:
        PolicyError: A rank was lost too often, or failed by itself.
        LostProcessError: A process was lost too often while the run started.
        Exception: What else an attempt raises.
    """
    losses: list[str] = []
    since, saved = 0, -1
    while True:
        try:
            return attempt(tuple(losses))
        except (LostProcessError, PolicyError) as error:
            if (isinstance(error, PolicyError) and not error.lost) or not max_failures:
                raise
            steps = Checkpoints(run_dir / CHECKPOINTS, keep=1).steps()
            latest = max(steps, default=0)
            since = 1 if latest > saved else since + 1
            saved = latest
            if since > max_failures:
                times = "once" if since == 2 else f"{since - 1} times"
                error.add_note(
                    f"The run resumed {times} without a new checkpoint "
                    f"(launch.max_failures={max_failures})"
                )
                raise
            # The log's end, which follows, is in logs/trainer.log already.
            losses.append(str(error).splitlines()[0].removesuffix("; its log ends with:"))
            _log.warning("resuming, %d of launch.max_failures=%d: %s", since, max_failures, error)


def settings_to_resume(config: ConfigT, losses: Sequence[str]) -> ConfigT:
    """Returns the configuration of an attempt: `run.resume=never` is of the first one only."""
    if not losses or config.run.resume != "never":
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": "auto"})})


def loss_notes(losses: Sequence[str], *, after: int | None) -> Sequence[str]:
    """Returns the notes of a run on its losses.

    Args:
        losses: Sentences about what was lost, in order.
        after: See `ResumePoint.after`. Without a checkpoint the notes of earlier losses are gone.
    """
    told = losses if after == -1 else losses[-1:]
    return [f"the run resumed by itself, after {loss}" for loss in told]
