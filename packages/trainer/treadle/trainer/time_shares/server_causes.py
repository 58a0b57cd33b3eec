"""The names of `servers/time_share/<cause>`, for reports, which do not query servers."""

from typing import Final

__all__ = ["SERVER_CAUSES"]

SERVER_CAUSES: Final = (
    "prefill",
    "decode",
    "tools",
    "training",
    "prompts",
    "weights",
    "memory",
    "down",
)
