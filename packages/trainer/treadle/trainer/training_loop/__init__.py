"""The training loop: schedules, and the moves that they are made of.

`schedules/` decides when groups begin and what a step trains on; `context.py` holds the parts of a
run. Sampling is in `rollout/`, learning in `algorithms/` and `policy/`.
"""
