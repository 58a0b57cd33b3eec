"""The rollout: the pool of rollout servers of a run, and the tasks that they sample.

Here live the server processes, the pool that keeps them healthy, and the way from rows to
trajectories. Nothing here computes an advantage or a gradient.
"""
