"""What tests of a rollout server are written with.

`engine_contract`, `model_contract`, `image_contract`, `collective_contract`, `remote_contract` and
`engine_command` are imported by themselves, since they need pytest.
"""

import sys

from treadle.rollout_server.testing.clock import FakeClock
from treadle.rollout_server.testing.process import ServerProcess, running_server, server_process
from treadle.rollout_server.testing.serving import serve_in_process
from treadle.rollout_server.testing.stubs import Stubs, stubs_for

CONTRACTS = tuple(
    f"{__name__}.{part}_contract"
    for part in ("collective", "control", "image", "model", "sampling", "update")
)
"""Modules whose bare assertions pytest must rewrite, to say what they compared."""

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*CONTRACTS)

__all__ = [
    "CONTRACTS",
    "FakeClock",
    "ServerProcess",
    "Stubs",
    "running_server",
    "serve_in_process",
    "server_process",
    "stubs_for",
]
