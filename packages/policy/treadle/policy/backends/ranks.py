"""What ranks do together, whatever the backend: meet, and write all of some files or none."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from treadle.policy.backend import CheckpointError, Rendezvous

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.policy.backend import Frame
    from treadle.policy.config.policy import ParallelConfig

CPU: Final = torch.device("cpu")
_STORES: Any = dist  # torch does not declare them


def device() -> torch.device:
    """Returns where the policy's tensors live."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU


def to_device(values: NDArray[Any], at: torch.device) -> Tensor:
    """Returns numbers on the device; the host does not wait for a copy to a GPU."""
    tensor = torch.from_numpy(values)
    if at.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(at, non_blocking=True)


def join(parallel: ParallelConfig, rendezvous: Rendezvous) -> None:
    """Joins the other ranks: NCCL with one GPU per rank with CUDA, else gloo.

    Raises:
        ValueError: The rendezvous is for another number of ranks than `parallel` makes.
        RuntimeError: A world is already up in this process.
    """
    if rendezvous.world_size != parallel.num_ranks:
        raise ValueError(
            f"parallel sizes {parallel.sizes} need {parallel.num_ranks} ranks, but "
            f"{rendezvous.world_size} were started"
        )
    if dist.is_initialized():
        raise RuntimeError("this process already belongs to a policy; close its world first")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(rendezvous.local_rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=_store(rendezvous),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timedelta(seconds=rendezvous.timeout_s),
    )


def _store(place: Rendezvous) -> Any:
    """Returns the key-value store that torch's process group starts from."""
    if place.world_size == 1:
        return _STORES.HashStore()
    if place.shared_file is not None:
        return _STORES.FileStore(str(place.shared_file), place.world_size)
    return _STORES.TCPStore(
        place.master_addr,
        place.master_port,
        place.world_size,
        is_master=place.rank == 0,
        timeout=timedelta(seconds=place.timeout_s),
        master_listen_fd=place.listener,
    )


def siblings_of(parallel: ParallelConfig, timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes the groups of the ranks that compute the same sequences; returns this rank's."""
    if parallel.num_ranks == parallel.data:
        return None
    mine: dist.ProcessGroup | None = None
    for number in range(parallel.data):
        ranks = [r for r in range(parallel.num_ranks) if parallel.data_rank(r) == number]
        # Sequences come from the driver into the host's memory, so gloo carries them.
        group = dist.new_group(ranks, timeout=timeout, backend="gloo")
        if dist.get_rank() in ranks:
            mine = group
    return mine


def share(frame: Frame | None, siblings: dist.ProcessGroup | None) -> Frame:
    """Returns what the first of some ranks gives; collective over them.

    Args:
        frame: The first rank's bytes; None on the others.
        siblings: On the host's network; None: this rank alone.
    """
    if siblings is None:
        assert frame is not None, "a rank without siblings leads"
        return frame
    size = torch.tensor([0 if frame is None else memoryview(frame).nbytes])
    dist.broadcast(size, group=siblings, group_src=0)
    if frame is None:
        frame = bytearray(int(size))
    if int(size):
        received = torch.from_numpy(np.frombuffer(frame, np.uint8))
        dist.broadcast(received, group=siblings, group_src=0)
    return frame


def sum_over_ranks(values_M: NDArray[np.float32], *, speaks: bool = True) -> NDArray[np.float32]:
    """Returns the sums of what the ranks that speak have; see `PolicyBackend.sum_over_shards`."""
    values = torch.from_numpy(values_M).to(device(), copy=True)
    if not speaks:
        values.zero_()
    dist.all_reduce(values)
    found: NDArray[np.float32] = values.cpu().numpy()
    return found


def save_folder(write: Callable[[Path], None], folder: Path) -> None:
    """Makes `folder`, of the files that `write` puts into it on rank 0; collective.

    Raises:
        CheckpointError: It could not be written; on every rank.
    """
    building = folder.with_name(f".{folder.name}.writing")

    def make() -> None:
        if folder.exists():
            raise FileExistsError(f"{folder} exists")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        try:
            write(building)
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)

    together(make if dist.get_rank() == 0 else None, folder)


def write_directory(
    directory: Path,
    write: Callable[[Path], None],
    finish: Callable[[Path], None],
    *,
    first: bool,
) -> None:
    """Makes `directory`, of what all ranks write into it; collective.

    Args:
        finish: Run on the first rank, when all others have written.
        first: Whether this rank makes the directory and gives it its name.

    Raises:
        CheckpointError: `directory` exists, or some rank could not write; on every rank.
    """
    building = directory.with_name(f".{directory.name}.writing")

    def prepare() -> None:
        if directory.exists():
            raise FileExistsError(f"{directory} exists")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)

    def end() -> None:
        finish(building)
        building.rename(directory)

    try:
        together(prepare if first else None, directory)
        together(lambda: write(building), directory)
        together(end if first else None, directory)
    except CheckpointError:
        if first:
            shutil.rmtree(building, ignore_errors=True)
        raise


def check_identity(directory: Path, written: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` if a checkpoint is of another model, or of other adapters."""
    different = [
        f"{name} is {written.get(name)}, not {own.get(name)}"
        for name in {**own, **written}
        if written.get(name) != own.get(name)
    ]
    if different:
        listed = ", ".join(different[:9])
        raise CheckpointError(f"the checkpoint in {directory} is of another model: {listed}")


def together(
    action: Callable[[], None] | None,
    place: Path,
    *,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Runs `action` where it is given, and fails on every rank if it failed on any.

    Args:
        action: This rank's part, or None.
        meanwhile: Run by ranks without an action, and by those whose action failed.
    """
    problem = None
    try:
        if action is not None:
            action()
    except (OSError, CheckpointException, RuntimeError) as error:
        problem = explain(error)
    if meanwhile is not None and (action is None or problem is not None):
        meanwhile()
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            free = shutil.disk_usage(_existing(place)).free
            raise CheckpointError(
                f"cannot write {place} (rank {rank}): {text} ({free >> 20} MiB are free there)"
            )


def _existing(place: Path) -> Path:
    """Returns the nearest directory above `place` that is there."""
    return next(path for path in place.absolute().parents if path.is_dir())


def explain(error: BaseException) -> str:
    """Returns the first cause in one line, without torch's tracebacks of every rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error, _ = next(iter(error.failures.values()))
    text = str(error).partition("\n")[0]
    if "inline_container" in text:  # torch's archive writer hides the system's error
        return "the system took only part of the data; is the disk or a quota full?"
    return f"{type(error).__name__}: {text}"
