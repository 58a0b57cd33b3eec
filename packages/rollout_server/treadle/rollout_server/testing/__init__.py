"""What tests of a rollout server are written with.

`engine_contract` is imported by itself, since it needs pytest.
"""

from treadle.rollout_server.testing.clock import FakeClock
from treadle.rollout_server.testing.process import server_process
from treadle.rollout_server.testing.serving import serve_in_process
from treadle.rollout_server.testing.stubs import Stubs, stubs_for

__all__ = ["FakeClock", "Stubs", "serve_in_process", "server_process", "stubs_for"]
