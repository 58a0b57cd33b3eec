"""What the workers of another process are told of a collective group, as text.

Invariant: a worker reads what the server wrote, field by field.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict

from treadle.rollout_server.engine import CollectiveGroup, ElementType, TensorSpec


def encode_group(group: CollectiveGroup, specs: Iterable[TensorSpec]) -> str:
    """What a worker is told of a group, and of what its senders send."""
    tensors = [[spec.name, spec.element_type.value, spec.shape] for spec in specs]
    return json.dumps([asdict(group), tensors])


def decode_group(message: str) -> tuple[CollectiveGroup, tuple[TensorSpec, ...]]:
    """The same in the worker."""
    group, tensors = json.loads(message)
    specs = tuple(
        TensorSpec(name=name, element_type=ElementType(element_type), shape=tuple(shape))
        for name, element_type, shape in tensors
    )
    return CollectiveGroup(**{**group, "senders": tuple(group["senders"])}), specs
