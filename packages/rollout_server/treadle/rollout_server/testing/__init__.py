"""What tests of a rollout server are written with; `engine_contract` needs pytest."""

from treadle.rollout_server.testing.clock import FakeClock

__all__ = ["FakeClock"]
