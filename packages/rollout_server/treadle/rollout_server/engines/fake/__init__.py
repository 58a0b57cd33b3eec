"""The fake engine, chosen as ``fake``: deterministic tokens, real scheduling, no model.

It passes the same contract suite as the real engines. It needs neither torch nor a GPU.
"""

from treadle.rollout_server.engines.fake.engine import create

__all__ = ["create"]
