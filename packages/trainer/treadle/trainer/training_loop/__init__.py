"""The training loop: schedules, and the moves that they are made of.

`sync.py` is the GRPO loop; `context.py` holds the parts of a run and the moves of a step. Sampling
is in `rollout/`, learning in `algorithms/` and `policy/`.
"""
