"""The checks before a run, of `--dry-run` and of every start.

`check.py` has their list, `describe.py` what the plan says about the user's files.
"""

from treadle.trainer.preflight.check import CheckedRun, check_run

__all__ = ["CheckedRun", "check_run"]
