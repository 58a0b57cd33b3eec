"""What a run shows in a browser: `report.html` with its charts, and `curves.png`.

Drawn from the logs of the run directory, whether the run is in progress, has ended or was killed.
"""
