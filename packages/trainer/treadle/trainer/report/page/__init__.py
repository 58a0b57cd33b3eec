"""The files of a run for a browser: `report.html` with its charts, and `curves.png`.

Drawn from the logs of the run directory, whether the run is in progress, has ended or was killed.
"""
