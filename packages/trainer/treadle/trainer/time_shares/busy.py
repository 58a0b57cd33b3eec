"""How busy each process was in a step: means over the processes hide one that stands idle."""

from collections.abc import Mapping

__all__ = ["busy_range"]


def busy_range(prefix: str, busy: Mapping[str, float]) -> dict[str, float]:
    """Returns the shares of the least and the most busy process, as metrics.

    Args:
        busy: Share of the step in which each process worked, by name; at least one.
    """
    shares = busy.values()
    return {f"{prefix}/busy_min": min(shares), f"{prefix}/busy_max": max(shares)}
