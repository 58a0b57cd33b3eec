"""Moves new weights into the server.

Read `weight_update.py` (the transaction), `incoming.py` (its bytes) and `weight_updater.py` (its
effect on the engine) first.
"""
