"""The doctor: whether a server can work here, and what to do where it cannot.

`facts.py` looks at the machine, `environment.py`, `host.py` and `model.py` judge what it saw
without looking themselves, `command.py` prints. `python -m treadle.rollout_server.doctor`, or
`treadle-rollout-server doctor`, with the options that the server would get.
"""
