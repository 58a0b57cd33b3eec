"""What tests of a rollout server are written with.

`engine_contract` is imported by itself, since it needs pytest.
"""

from treadle.rollout_server.testing.clock import FakeClock
from treadle.rollout_server.testing.serving import serve_in_process

__all__ = ["FakeClock", "serve_in_process"]
