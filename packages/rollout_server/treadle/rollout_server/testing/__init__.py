"""Helpers for tests that start a rollout server, in this process or in a separate one.

Helpers that several packages use are here; helpers of one folder are in its `testing.py` or
`testing/`, and fixtures in its `conftest.py`; see CONTRIBUTING.md.

The wheel includes them, because tests of other servers and engines use them too. The suites that
an engine must pass, and the client for a server, are in the package `treadle.conformance`.
`engine_command` is not imported here because it needs pytest.
"""

from treadle.rollout_server.testing.clock import FakeClock
from treadle.rollout_server.testing.held_address import held_address
from treadle.rollout_server.testing.process import ServerProcess, running_server, server_process
from treadle.rollout_server.testing.serving import serve_in_process

__all__ = [
    "FakeClock",
    "ServerProcess",
    "held_address",
    "running_server",
    "serve_in_process",
    "server_process",
]
