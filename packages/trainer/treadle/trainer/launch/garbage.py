"""Garbage collection in the processes that run agent loops: the driver and the loop workers."""

import gc

__all__ = ["exempt_present_objects"]


def exempt_present_objects() -> None:
    """Exempts what there is from garbage collection, after one; `gc.unfreeze` takes that back.

    What lives as long as a run is no garbage: looking through it, again and again while
    trajectories come and go, costs a sixth of a turn (`benchmarks/loop_overhead.py`).
    """
    gc.collect()
    gc.freeze()
