"""The engine contract: suites to inherit, for an engine in process or behind an address.

`engine_contract.py` specifies what every engine does; the other files are its parts. Tests of one
engine only belong next to that engine.
"""

import sys

CONTRACTS = tuple(
    f"{__name__}.{part}_contract"
    for part in ("collective", "control", "image", "in_process", "model", "sampling", "update")
)
"""Modules whose assertions pytest rewrites, so that failures show the compared values."""

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*CONTRACTS)

__all__ = ["CONTRACTS"]
