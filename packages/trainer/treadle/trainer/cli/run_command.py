"""What `treadle train` and `treadle sft` share: a run, and what its end prints and returns."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.trainer.cli.console import FULL_DISK, exit_text, fail, say
from treadle.trainer.cli.interrupt import Interrupted, interrupted_text, until_signal

if TYPE_CHECKING:
    from treadle.trainer.report import Summary

__all__ = ["run_command"]


def run_command(
    attempt: "Callable[[Sequence[str]], Coroutine[Any, Any, Summary]]",
    run_dir: Path,
    *,
    max_failures: int,
) -> int:
    """Runs to the end, resuming after losses; returns the exit status.

    Args:
        attempt: Checks the run and returns its work, after what earlier attempts lost.
    """
    from treadle.policy.algorithms.estimators import AdvantageError
    from treadle.policy.client.group import PolicyError
    from treadle.policy.weight_sync.errors import WeightSyncError
    from treadle.trainer.launch.process import ProcessError
    from treadle.trainer.launch.resuming import run_resuming
    from treadle.trainer.preflight.table import INPUT_ERRORS
    from treadle.trainer.report import print_summary
    from treadle.trainer.rollout.outages import OutageError
    from treadle.trainer.rollout.server_pool import NoServerLeftError
    from treadle.trainer.training_loop.groups import NoGroupLeftError

    failures = (
        AdvantageError,
        NoGroupLeftError,
        NoServerLeftError,
        OutageError,
        ProcessError,
        WeightSyncError,
    )

    def run(losses: Sequence[str]) -> "Summary":
        return asyncio.run(until_signal(attempt(losses)))

    try:
        summary = run_resuming(run, run_dir=run_dir, max_failures=max_failures)
    except INPUT_ERRORS as error:
        return fail(error)
    except PolicyError as error:
        return fail(error, status=2 if error.from_input else 1)
    except failures as error:
        return fail(error, status=1)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        return fail(OSError(f"run.dir={run_dir}: {error.strerror}; make room and start again"))
    except Interrupted as ended:
        say(interrupted_text(run_dir), error=True)
        return 128 + ended.number
    except SystemExit as exit_:
        # The status would be the user's, 0 even, though the run has not done what was asked.
        say(f"error: {exit_text(exit_)}", error=True)
        return 1
    print_summary(summary, run_dir)
    return 0
