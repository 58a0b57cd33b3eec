"""The ways of weights from the policy's ranks to the rollout servers.

One file per transport, with both of its sides: what the driver does in a round, and what a rank
sends. What all of them share is in `weight_sync/`.
"""
