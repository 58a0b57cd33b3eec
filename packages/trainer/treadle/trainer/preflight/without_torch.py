"""Keeps torch out of a process that only reads tokenizers."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["transformers_without_torch"]

_NO_ADVICE: Final = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


@contextmanager
def transformers_without_torch() -> Iterator[None]:
    """Lets transformers find no torch while it is imported in the block.

    Importing torch takes longer than everything else that a dry run does. The process sees
    transformers so to its end, therefore this is for a command that ends soon; it does nothing if
    either was imported before, as by the user's own reward.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # how Python marks what is not there
    advice = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        sys.modules.pop("torch", None)
        os.environ.pop(_NO_ADVICE)
        if advice is not None:
            os.environ[_NO_ADVICE] = advice
