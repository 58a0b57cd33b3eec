"""The critic: a second Megatron model on the policy's ranks that estimates returns, for PPO.

- `backend`: its values, its updates and its checkpoints.
- `model`: the policy's decoder with a value head in place of the output layer.
"""
