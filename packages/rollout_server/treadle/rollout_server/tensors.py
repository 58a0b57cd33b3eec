"""Compares a set of announced tensors with an engine's parameters.

Invariant: a set passes when it names each of the engine's parameters once, in its shape. The
element type may differ, since the engine converts it. The first difference is reported, so that
a message names one tensor and one fix.
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

    Raises:
        TensorMismatch: A tensor is unknown, announced twice, of another shape, or missing.
    """
    checked = TensorCheck(parameters)
    for spec in announced:
        checked.add(spec)
    checked.finish()


class TensorCheck:
    """Does the same for tensors that arrive one by one."""

    def __init__(self, parameters: tuple[TensorSpec, ...] | None) -> None:
        self._held = None if parameters is None else {spec.name: spec for spec in parameters}
        self._seen: set[str] = set()

    def add(self, spec: TensorSpec) -> None:
        """Checks the next tensor.

        Raises:
            TensorMismatch: It is unknown, duplicated, or has another shape.
        """
        if spec.name in self._seen:
            raise TensorMismatch(spec.name, "it once", "announced twice")
        self._seen.add(spec.name)
        if self._held is None:
            return
        if spec.name not in self._held:
            raise TensorMismatch(spec.name, ABSENT, spec.label)
        if spec.shape != self._held[spec.name].shape:
            raise TensorMismatch(spec.name, self._held[spec.name].label, spec.label)

    def finish(self) -> None:
        """Checks that every tensor was added.

        Raises:
            TensorMismatch: One is missing.
        """
        for name, spec in (self._held or {}).items():
            if name not in self._seen:
                raise TensorMismatch(name, spec.label, ABSENT)
