"""Models and rows of the demos, made by `examples/warm_start`.

A configuration names the models by `model.path=demo:calculator` or `demo:math_expression`.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

_HERE = Path(__file__).parent

DEMO = _HERE / "calculator" / "config.yaml"
"""The configuration of a run that names none."""
MODELS: Final[Mapping[str, Path]] = MappingProxyType(
    {f"demo:{name}": _HERE / name / "model" for name in ("calculator", "math_expression")}
)
"""The directories of the models, by the names that `model.path` takes."""


def is_demo_model(text: str) -> bool:
    """Returns whether the text has the form demo:NAME."""
    return text.startswith("demo:")
