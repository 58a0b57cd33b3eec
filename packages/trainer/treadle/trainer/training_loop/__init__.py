"""The training loop: schedules, and the moves that they are made of.

`sync.py` is the GRPO loop; `context.py` holds the parts of a run and the moves of a step. How
tokens are sampled belongs to `rollout/`, how they are learned from to `algorithms/` and `policy/`.
"""
