"""The fake engine, selected as ``fake``: deterministic tokens, real scheduling, no model.

It passes the same contract suite as the real engines and needs neither torch nor a GPU.
"""

from treadle.rollout_server.engines.fake.engine import create

__all__ = ["create"]
