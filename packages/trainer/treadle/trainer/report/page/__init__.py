"""The files of a run for people: `report.html`, the viewer's page as one file, and `curves.png`.

Made from the files of the run directory, whether the run is in progress, has ended or was killed.
"""
