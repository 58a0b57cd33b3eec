"""The policy: the model being trained, its ranks, and the contract between driver and ranks.

`group.py` is the driver's end, `rank.py` the process of a rank, `backend.py` the interface of a
policy, `batch.py` the plan of a batch. Only `megatron/` imports Megatron-core. The driver imports
no torch.
"""
