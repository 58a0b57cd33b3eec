"""The engine contract: suites to inherit, for an engine in process or behind an address.

`engine_contract.py` says what every engine does; the other files are its parts. Suites for one
engine alone belong beside that engine.
"""

import sys

CONTRACTS = tuple(
    f"{__name__}.{part}_contract"
    for part in ("collective", "control", "image", "model", "sampling", "update")
)
"""Modules whose bare assertions pytest must rewrite, to say what they compared."""

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*CONTRACTS)

__all__ = ["CONTRACTS"]
