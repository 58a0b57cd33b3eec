"""The penalty of responses that come close to the longest that is allowed."""

from __future__ import annotations

__all__ = ["overlong_penalty"]


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, factor: float) -> float:
    """Returns what a response of this length loses of its reward; 0 or less.

    DAPO (arXiv:2503.14476), equation 13, soft overlong punishment: 0 up to max_tokens - buffer,
    then falling linearly to -factor at max_tokens. verl's `dapo` reward manager.

    Args:
        num_tokens: After the prompt, sampled and observed.
        max_tokens: The longest response that is allowed.
        buffer: Length of the last stretch, in which the penalty grows.
    """
    over = num_tokens - (max_tokens - buffer)
    return -factor * min(max(over, 0) / buffer, 1.0)
