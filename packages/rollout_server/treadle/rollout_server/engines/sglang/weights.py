"""Messages about weights between the server and SGLang's workers.

Invariant: no byte of a tensor goes through a socket. A worker gets the file of a tensor
(`engines/common/staging.py`) or the group that sends it, and maps or receives it.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass

import torch

from treadle.rollout_server.engine import NamedTensor
from treadle.rollout_server.engines.common.staging import Entry, MappedFiles


def split_batches(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Yields consecutive tensors of at most `max_bytes` in total; a larger tensor goes alone."""
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
class WorkerError:
    """The failure of a command in a worker.

    Attributes:
        broken_group: Whether a collective group ended; the worker itself still works.
    """

    cause: str
    broken_group: bool = False


def encode_errors(errors: Iterable[WorkerError]) -> str:
    """Encodes the errors of all ranks, as a worker's answer."""
    return json.dumps([asdict(error) for error in errors])


def decode_errors(message: str) -> list[WorkerError]:
    """Decodes the answer of `encode_errors`, in the server."""
    return [WorkerError(**error) for error in json.loads(message)]


def encode_batch(entries: Iterable[Entry]) -> str:
    """Encodes the entries of a batch of tensors."""
    return json.dumps(list(entries))


def map_batch(message: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a batch in host memory; each is valid until the next is requested.

    Raises:
        OSError: A file cannot be map_batch.
    """
    with closing(MappedFiles()) as files:
        for entry in json.loads(message):
            yield entry[0], files.tensor(entry)
