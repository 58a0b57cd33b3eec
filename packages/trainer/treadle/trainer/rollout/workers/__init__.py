"""Loop workers: processes that run the agent loops of a run, with their tools and rewards.

`worker.py` is the process of a worker, `pool.py` the driver's end of all of them, `router.py` the
routing service that they share. Nothing here computes an advantage or starts a rollout server.
"""
