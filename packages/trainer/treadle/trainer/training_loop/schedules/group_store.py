"""The group store: groups that have ended and are not trained on yet, as files of the run.

Together with the state that each checkpoint has (`QueueState`) it is the journal of a run whose
rollouts continue beside training. After a kill, at any moment:

- A group that was trained on up to the checkpoint, or left out, is not in its state: never again.
- A group that had ended waits again, with the tokens it had, if weights up to the checkpoint's
  sampled all of them. Later weights are lost, and will be trained again.
- Any other group begins again from its row. So does one whose file is missing or damaged: a file
  saves work, and its loss skips nothing.

Invariant: a file is complete or absent, and is never written again. It is removed when no
checkpoint can need it: the group was trained on, and a checkpoint was completed since, or weights
later than the last checkpoint's sampled a token of it.

A file holds four letters, the CRC-32 of the rest, and a `StoredGroup` (`trajectory.proto`): the
trajectories without their tasks, which the row gives. Reading it runs no code of whoever wrote it.

Who waits: two threads of the store for the disk. A disk that stands still holds these only, not
those of the event loop that `treadle servers`, checkpoints and `on_step` share. What waits for them
are groups that no step has trained on, which the schedule bounds; `trained` waits for its batch's.
"""

import asyncio
import logging
import zlib
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from treadle.agent_loop import AgentTask, Image, Trajectory
from treadle.loop_worker.v1 import trajectory_pb2 as pb
from treadle.trainer.rollout.workers.trajectory_codec import (
    messages_crc32,
    read_trajectory,
    write_trajectory,
)
from treadle.trainer.training_loop.groups import Group
from treadle.trainer.training_loop.schedules.group_queue import Waiting

__all__ = ["GROUPS", "GroupStore", "versions"]

GROUPS: Final = "groups"
"""Folder of a run directory that holds the files."""
_log = logging.getLogger(__name__)
_MAGIC: Final = b"TGR1"
_THREADS: Final = 2


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
        except Exception as error:  # what is no group of ours raises anything
            _log.warning("%s cannot be used, so its group begins again: %s", path, error)
            found = None
        if found is None or found.birth > self._checkpoint or _newest(found) > self._checkpoint:
            path.unlink()
            return None
        return found

    def remove_all_before(self, number: int, *, but: Container[int]) -> None:
        """Removes files that a trainer left which died after it had completed a checkpoint."""
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
        """Removes the files of trained groups, as the checkpoint of a step is complete."""
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
        try:
            members = (
                pb.StoredMember(
                    rollout_index=each.task.rollout_index,
                    trajectory=write_trajectory(each, each.task),
                    messages_crc32=messages_crc32(each.task),
                )
                for each in ended.group.trajectories
            )
            group = pb.StoredGroup(number=ended.number, birth=ended.birth, members=members)
            data = group.SerializeToString()
        except Exception as error:  # a loop of the user may put anything into a trajectory
            _log.warning(
                "group %d cannot be kept, so it begins again if the run is killed: %s",
                ended.number,
                error,
            )
            return
        partial = self._path(ended.number).with_suffix(".partial")
        partial.write_bytes(_MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)
        partial.replace(self._path(ended.number))

    def _read(self, path: Path, number: int) -> Waiting:
        content = path.read_bytes()
        magic, crc, data = content[:4], content[4:8], content[8:]
        if magic != _MAGIC:
            raise ValueError("it is of another version of Treadle")
        written, computed = int.from_bytes(crc, "little"), zlib.crc32(data)
        if written != computed:
            raise ValueError(f"its CRC-32 is {computed:08x}, and {written:08x} was written")
        group = pb.StoredGroup.FromString(data)
        if group.number != number:
            raise ValueError(f"it is of group {group.number}")
        tasks = {task.rollout_index: task for task in self._tasks(number)}
        known: dict[Image, Image] = {}
        trajectories = []
        for member in group.members:
            task = tasks[member.rollout_index]
            if messages_crc32(task) != member.messages_crc32:
                raise ValueError(f"rollout {task.rollout_index} had another prompt")
            read = read_trajectory(member.trajectory, task, known)
            trajectories.append(read.replaced(task=task))
        if len(trajectories) != len(tasks):
            raise ValueError(f"it has {len(trajectories)} of {len(tasks)} trajectories")
        return Waiting(
            number=number, birth=group.birth, group=Group(trajectories=tuple(trajectories))
        )


def _newest(ended: Waiting) -> int:
    """Returns the newest version that sampled a token of a group."""
    return max((v for t in ended.group.trajectories for v in versions(t)), default=0)


def versions(trajectory: Trajectory) -> list[int]:
    """Returns the oldest and the newest weight version of each sample of a trajectory."""
    return [v for sample in trajectory.samples for v in sample.weight_versions or ()]
