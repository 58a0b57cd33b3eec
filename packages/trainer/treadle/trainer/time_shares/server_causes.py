"""The names of `servers/time_share/<cause>`; reports draw them, without what asks the servers."""

from typing import Final

__all__ = ["SERVER_CAUSES"]

SERVER_CAUSES: Final = (
    *("prefill", "decode", "tools", "idle", "waiting"),
    *("weights", "memory", "down"),
)
"""As in the metrics, which have either `waiting` or the two that it is divided into."""
