"""The commands of `treadle`, one module each: argv -> output and an exit status.

A module has `main(argv)`, which returns the status, and loads heavy libraries only when it works.
"""
