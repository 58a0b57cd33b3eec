"""The transports of weights, from the policy's ranks to the rollout servers.

One file per transport has both sides: what the driver does in an update round, and what a rank
sends. What they share is in `weight_sync/`.
"""
