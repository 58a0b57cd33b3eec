"""Checkpoints of a run: the run directory's state, and whether a run may resume from it.

Tensors of the policy are written by `policy/megatron/checkpoint.py`.
"""
