"""Schedules: when groups of trajectories begin, and which of them a step trains on.

`step.py` has the moves that all schedules share: what happens to the groups of a step, from their
rewards to the line of metrics.
"""
