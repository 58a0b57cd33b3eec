"""What tests start a rollout server with: in this process, or as a process of its own.

Test code, in no wheel. The suites that an engine must pass, and the client to ask a server with,
are in the package `treadle.conformance`. `engine_command` is imported by itself: it needs pytest.
"""

from treadle.rollout_server.testing.clock import FakeClock
from treadle.rollout_server.testing.process import ServerProcess, running_server, server_process
from treadle.rollout_server.testing.serving import serve_in_process

__all__ = [
    "FakeClock",
    "ServerProcess",
    "running_server",
    "serve_in_process",
    "server_process",
]
