"""The checkpoint: weights, optimizer state and step, read by any number of ranks.

Invariant: a checkpoint directory is complete or does not exist (`ranks.write_directory`).
`torch.distributed.checkpoint` writes tensors by name and place in the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from treadle.policy.backend import CheckpointError
from treadle.policy.backends.ranks import check_identity, explain, write_directory

if TYPE_CHECKING:
    from torch import Tensor

_STATE: Final = "state.json"


def save(tensors: Mapping[str, Tensor], identity: Any, directory: Path, *, step: int) -> None:
    """Writes a checkpoint; collective.

    Args:
        identity: Facts that the policy that reads it must share, as JSON has them.
        directory: Made by this call, on a file system that all ranks see.

    Raises:
        CheckpointError: `directory` exists, or some rank could not write; on every rank.
    """

    def write(building: Path) -> None:
        writer = FileSystemWriter(building, thread_count=1, sync_files=True)
        save_tensors(dict(tensors), storage_writer=writer)

    def finish(building: Path) -> None:
        state = {"step": step, "identity": identity}
        (building / _STATE).write_text(json.dumps(state), encoding="utf-8")

    write_directory(directory, write, finish, first=dist.get_rank() == 0)


def load(tensors: Mapping[str, Tensor], identity: Any, directory: Path) -> int:
    """Fills the tensors from a checkpoint; collective.

    Returns:
        The step it was written at.

    Raises:
        CheckpointError: The checkpoint is missing, damaged, or of another model.
    """
    if not (directory / _STATE).is_file():
        raise CheckpointError(f"{directory} holds no complete checkpoint")
    try:
        state = json.loads((directory / _STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{directory / _STATE} is damaged: {error}") from error
    check_identity(directory, state["identity"], json.loads(json.dumps(identity)))
    try:
        load_tensors(dict(tensors), storage_reader=FileSystemReader(directory))
    except CheckpointException as error:
        raise CheckpointError(f"{directory} is damaged: {explain(error)}") from error
    return int(state["step"])
