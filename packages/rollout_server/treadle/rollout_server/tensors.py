"""Tensor sets: whether what is announced is what an engine holds.

Invariant: a set passes when it names each of the engine's parameters once, in its shape.
The element type may differ, since the engine converts it. The first difference found is
the one reported, so that a message names one tensor and one fix.
"""

from collections.abc import Iterable

from treadle.rollout_server.engine import TensorSpec
from treadle.rollout_server.errors import TensorMismatch

ABSENT = "absent"


def check_tensors(
    parameters: tuple[TensorSpec, ...] | None, announced: Iterable[TensorSpec]
) -> None:
    """Compares an announced set with an engine's parameters.

    Args:
        parameters: `EngineInfo.parameters`; None takes any set of distinct names.
        announced: What is to be loaded.

    Raises:
        TensorMismatch: A tensor is unknown, announced twice, of another shape, or missing.
    """
    held = None if parameters is None else {spec.name: spec for spec in parameters}
    seen: set[str] = set()
    for spec in announced:
        if spec.name in seen:
            raise TensorMismatch(spec.name, "it once", "announced twice")
        seen.add(spec.name)
        if held is None:
            continue
        if spec.name not in held:
            raise TensorMismatch(spec.name, ABSENT, spec.label)
        if spec.shape != held[spec.name].shape:
            raise TensorMismatch(spec.name, held[spec.name].label, spec.label)
    for name in held or ():
        if name not in seen:
            raise TensorMismatch(name, held[name].label if held else ABSENT, ABSENT)
