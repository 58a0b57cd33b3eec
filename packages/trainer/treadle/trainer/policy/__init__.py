"""The policy: the model being trained, its ranks, and the commands between driver and ranks.

Here live the driver's end (`group.py`), the process of one rank (`rank.py`) and the plan of a
batch. Only `megatron/` imports Megatron-core; the driver imports no torch.
"""
