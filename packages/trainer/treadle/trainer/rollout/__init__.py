"""The rollout: the pool of rollout servers of a run, and the tasks that they sample.

This package starts the server processes, keeps the pool healthy, and turns tasks into
trajectories. Nothing here computes an advantage or a gradient.
"""
