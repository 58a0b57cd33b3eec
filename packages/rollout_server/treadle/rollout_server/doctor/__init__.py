"""The doctor: checks whether a server can run on this machine, and how to fix what fails.

`facts.py` gathers facts about the machine; `environment.py`, `host.py` and `model.py` check them
without access to the machine; `command.py` prints the findings. Run it as `python -m
treadle.rollout_server.doctor` or `treadle-rollout-server doctor`, with the server's options.
"""
