"""What a run records and shows: metrics, trajectories, progress, summary and report.

While it runs: `MetricsLog`, `TrajectoryLog` and `open_progress`, fed with `rollout_metrics` and
`validation_metrics`. At its end: `write_reports` and `print_summary`.
"""

from treadle.trainer.report.console import print_summary
from treadle.trainer.report.files import write_reports
from treadle.trainer.report.metrics import MetricsLog, read_metrics
from treadle.trainer.report.progress import Progress, open_progress
from treadle.trainer.report.rollout import rollout_metrics, validation_metrics
from treadle.trainer.report.summary import Change, Summary, summarize
from treadle.trainer.report.trajectories import TrajectoryLog

__all__ = [
    "Change",
    "MetricsLog",
    "Progress",
    "Summary",
    "TrajectoryLog",
    "open_progress",
    "print_summary",
    "read_metrics",
    "rollout_metrics",
    "summarize",
    "validation_metrics",
    "write_reports",
]
