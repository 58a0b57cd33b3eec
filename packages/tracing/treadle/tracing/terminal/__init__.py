"""Runs in the terminal: `treadle view --text RUN`.

`run` opens the app: `app` has the curves and the table of trajectories, `conversation` one
trajectory. What a run writes is read again every two seconds; nothing is written. Needs the extra
`terminal`.
"""

from treadle.tracing.terminal.app import run

__all__ = ["run"]
