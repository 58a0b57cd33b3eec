"""What SGLang's workers are told of weights, and what they make of it.

Invariant: no byte of a tensor goes through a socket. A worker is told in which file a tensor
lies (`engines/staging.py`) or which group sends it, as text, and maps or receives it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass

import torch

from treadle.rollout_server.engine import NamedTensor
from treadle.rollout_server.engines.common.mapped_files import MappedFiles
from treadle.rollout_server.engines.common.staging import Entry


def batches(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Neighbours that together hold at most `max_bytes`; a larger tensor goes alone."""
    batch: list[NamedTensor] = []
    num_bytes = 0
    for tensor in tensors:
        if batch and num_bytes + tensor.spec.size_bytes > max_bytes:
            yield batch
            batch, num_bytes = [], 0
        batch.append(tensor)
        num_bytes += tensor.spec.size_bytes
    if batch:
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a worker could not do what it was told.

    Attributes:
        cause: For people.
        broken_group: Whether another member of a group, or nobody, is at fault.
    """

    cause: str
    broken_group: bool = False


def encode_problems(problems: Iterable[Problem]) -> str:
    """What a worker answers, for all of its ranks."""
    return json.dumps([asdict(problem) for problem in problems])


def decode_problems(message: str) -> list[Problem]:
    """The same in the server."""
    return [Problem(**problem) for problem in json.loads(message)]


def encode(entries: Iterable[Entry]) -> str:
    """What a worker is told of a batch."""
    return json.dumps(list(entries))


def mapped(message: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, in host memory; each is good until the next is asked for.

    Raises:
        OSError: A file cannot be mapped.
    """
    with closing(MappedFiles()) as files:
        for entry in json.loads(message):
            yield entry[0], files.tensor(entry)
