"""Weight synchronization: one weight version, from the policy's ranks to the rollout servers.

The driver's `publisher.py` runs one `update_round.py` per version. `transports/` and `delta.py`
send the bytes.
"""
