"""Sandboxes: where code that a model wrote is run.

`LocalSandbox` isolates it on this machine with bubblewrap and serves it over SandboxFusion's API
(`python -m treadle.tools.sandbox`); `treadle.tools.sandbox.fusion.FusionSandbox` speaks that API;
`treadle.tools.sandbox.restricted.RestrictedSandbox` interprets small programs in a helper
process. What each protects against is in docs/sandbox.md.
"""

from treadle.tools.sandbox.execution import (
    Execution,
    Program,
    RunStatus,
    Sandbox,
    SandboxBusyError,
    SandboxError,
    UnsupportedProgramError,
)
from treadle.tools.sandbox.limits import SandboxLimits
from treadle.tools.sandbox.local import LocalSandbox, SandboxStats

__all__ = [
    "Execution",
    "LocalSandbox",
    "Program",
    "RunStatus",
    "Sandbox",
    "SandboxBusyError",
    "SandboxError",
    "SandboxLimits",
    "SandboxStats",
    "UnsupportedProgramError",
]
