"""The group store: groups that have ended and are not trained on yet, as files of the run.

Together with the state that each checkpoint has (`QueueState`) it is the journal of a run whose
rollouts continue beside training. After a kill, at any moment:

- A group that was trained on up to the checkpoint, or left out, is not in its state: never again.
- A group that had ended waits again, with the tokens it had, if weights up to the checkpoint's
  sampled all of them. Later weights are lost, and will be trained again.
- Any other group begins again from its row. So does one whose file is missing or damaged: a file
  saves work, and its loss skips nothing.

Invariant: a file is there whole or not at all, and is never written again. It is removed when no
checkpoint can ask for it: the group was trained on, and a checkpoint was completed since, or later
weights than the last checkpoint's sampled a token of it.

A file holds the CRC-32 of a pickle of the trajectories without their tasks, which the row gives. It
is read with the classes of `treadle` only, so that a file can run no code of somebody else.

Who waits: two threads of the store for the disk. A disk that stands still holds these only, not
those of the event loop that `treadle servers`, checkpoints and `on_step` share. What waits for them
are groups that no step has trained on, which the schedule bounds; `trained` waits for its batch's.
"""

import asyncio
import io
import logging
import pickle
import zlib
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from treadle.agent_loop import AgentTask, Message, Trajectory
from treadle.trainer.training_loop.groups import Group
from treadle.trainer.training_loop.schedules.group_queue import Waiting

__all__ = ["GROUPS", "GroupStore", "versions"]

GROUPS: Final = "groups"
"""Folder of a run directory that holds the files."""
_log = logging.getLogger(__name__)
_PICKLE_PROTOCOL: Final = 5
_THREADS: Final = 2
_NO_TASK: Final = AgentTask(
    task_id="",
    sample_index=0,
    rollout_index=0,
    loop="",
    messages=(Message(role="user", content=""),),
)


class GroupStore:
    """The groups of one run.

    Args:
        directory: `groups` of the run directory.
        tasks: Returns the tasks of a group by its number.
        checkpoint: Step of the last checkpoint; 0: the run begins.
        new: Whether the run is new: then files that are there are of another one, and removed.
        threads: Write the files; None: two of the store's.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tasks: Callable[[int], Sequence[AgentTask]],
        checkpoint: int,
        new: bool,
        threads: Executor | None = None,
    ) -> None:
        self._directory = directory
        self._tasks = tasks
        self._checkpoint = checkpoint
        self._writing: dict[int, asyncio.Future[None]] = {}
        self._threads = threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="group-store")
        self._trained: set[int] = set()
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob("*" if new else "*.partial"):
            leftover.unlink()

    def close(self) -> None:
        """Begins no more writes; after `flush` none waits."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def load(self, number: int) -> Waiting | None:
        """Returns a group that had ended at the checkpoint's weights or before; None: it had not.

        The file of one that later weights sampled is removed.
        """
        path = self._path(number)
        try:
            found = self._read(path, number)
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged pickle raises anything
            _log.warning("%s cannot be used, so its group begins again: %s", path, error)
            found = None
        if found is None or found.birth > self._checkpoint or _newest(found) > self._checkpoint:
            path.unlink()
            return None
        return found

    def remove_all_before(self, number: int, *, but: Container[int]) -> None:
        """Removes files that a trainer left which died after it had completed a checkpoint.

        Args:
            number: Of the group that is started next.
            but: Groups that wait.
        """
        for path in self._directory.glob("group-*"):
            written = int(path.name.removeprefix("group-"))
            if written < number and written not in but:
                path.unlink()

    def save(self, ended: Waiting) -> None:
        """Begins to write a group."""
        loop = asyncio.get_running_loop()
        self._writing[ended.number] = loop.run_in_executor(self._threads, self._write, ended)

    async def trained(self, batch: Sequence[Waiting]) -> None:
        """A step trains on the groups.

        Raises:
            OSError: One could not be written.
        """
        for group in batch:
            await self._written(group.number)
            if _newest(group) > self._checkpoint:
                self._path(group.number).unlink(missing_ok=True)
            else:
                self._trained.add(group.number)

    async def flush(self) -> None:
        """Waits until all groups are written.

        Raises:
            OSError: One could not be written.
        """
        for number in list(self._writing):
            await self._written(number)

    def checkpointed(self, step: int) -> None:
        """A checkpoint of a step is complete: what was trained on is not asked for any more."""
        self._checkpoint = step
        for number in self._trained:
            self._path(number).unlink(missing_ok=True)
        self._trained.clear()

    async def _written(self, number: int) -> None:
        writing = self._writing.pop(number, None)
        if writing is not None:
            await writing

    def _path(self, number: int) -> Path:
        return self._directory / f"group-{number:010d}"

    def _write(self, ended: Waiting) -> None:
        members = [t.replaced(task=_NO_TASK) for t in ended.group.trajectories]
        indices = [t.task.rollout_index for t in ended.group.trajectories]
        try:
            data = pickle.dumps((ended.number, ended.birth, indices, members), _PICKLE_PROTOCOL)
        except Exception as error:  # a loop of the user may put anything into a trajectory
            _log.warning(
                "group %d cannot be kept, so it begins again if the run is killed: %s",
                ended.number,
                error,
            )
            return
        partial = self._path(ended.number).with_suffix(".partial")
        partial.write_bytes(zlib.crc32(data).to_bytes(4, "little") + data)
        partial.replace(self._path(ended.number))

    def _read(self, path: Path, number: int) -> Waiting:
        content = path.read_bytes()
        data = content[4:]
        written, computed = int.from_bytes(content[:4], "little"), zlib.crc32(data)
        if written != computed:
            raise ValueError(f"its CRC-32 is {computed:08x}, and {written:08x} was written")
        own, birth, indices, members = _Unpickler(io.BytesIO(data)).load()
        if own != number:
            raise ValueError(f"it is of group {own}")
        tasks = {task.rollout_index: task for task in self._tasks(number)}
        trajectories = tuple(
            trajectory.replaced(task=tasks[index])
            for index, trajectory in zip(indices, members, strict=True)
        )
        if len(trajectories) != len(tasks):
            raise ValueError(f"it has {len(trajectories)} of {len(tasks)} trajectories")
        return Waiting(number=number, birth=birth, group=Group(trajectories=trajectories))


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes of `treadle` only."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        if module.split(".")[0] == "treadle":
            found = super().find_class(module, name)
            if isinstance(found, type):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not a class of treadle")


def _newest(ended: Waiting) -> int:
    """Returns the newest version that sampled a token of a group."""
    return max((v for t in ended.group.trajectories for v in versions(t)), default=0)


def versions(trajectory: Trajectory) -> list[int]:
    """Returns the oldest and the newest weight version of each sample of a trajectory."""
    return [v for sample in trajectory.samples for v in sample.weight_versions or ()]
