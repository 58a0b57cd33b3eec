"""Records of a run, and what it shows: metrics, trajectories, progress, summary and report.

While it runs: `MetricsLog`, `TrajectoryLog` and `open_progress`, fed with `rollout_metrics` and
`validation_metrics`, and `live_report`. At its end: `print_summary`. At any time: `write_reports`.
"""

from treadle.trainer.report.metrics import MetricsLog, last_saved_step, read_metrics
from treadle.trainer.report.notes import AlertLog, NotesLog
from treadle.trainer.report.pace import Pace
from treadle.trainer.report.page.files import write_page, write_reports
from treadle.trainer.report.page.live import LiveReport, live_report
from treadle.trainer.report.rollout import rollout_metrics, validation_metrics
from treadle.trainer.report.status import read_status
from treadle.trainer.report.summary import Change, Summary, final_numbers, summarize
from treadle.trainer.report.terminal.console import print_summary
from treadle.trainer.report.terminal.progress import Progress, open_progress
from treadle.trainer.report.trajectories import TrajectoryLog

__all__ = [
    "AlertLog",
    "Change",
    "LiveReport",
    "MetricsLog",
    "NotesLog",
    "Pace",
    "Progress",
    "Summary",
    "TrajectoryLog",
    "final_numbers",
    "last_saved_step",
    "live_report",
    "open_progress",
    "print_summary",
    "read_metrics",
    "read_status",
    "rollout_metrics",
    "summarize",
    "validation_metrics",
    "write_page",
    "write_reports",
]
