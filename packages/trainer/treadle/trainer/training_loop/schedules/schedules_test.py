"""The rules and the journal of the schedules, over any order of ends, checkpoints and kills.

The machine is a run without processes: the real queue, rules and store, with weights that are a
number. What it trained is known, so that each row can be counted.
"""

import asyncio
import os
import pickle
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.trainer.rollout.workers.trajectory_codec import read_trajectory, write_trajectory
from treadle.trainer.training_loop.schedules.group_queue import (
    GroupQueue,
    QueueState,
    Rule,
    Waiting,
)
from treadle.trainer.training_loop.schedules.group_store import GroupStore
from treadle.trainer.training_loop.schedules.rules import AsyncRule, OverlapRule, StreamRule
from treadle.trainer.training_loop.schedules.testing import group_of, tasks_of

_TOTAL_STEPS = 6


class _Disk(ThreadPoolExecutor):
    """Writes only when it is told to, so that a kill may come before a file is written."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self._held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keeps the work."""
        future = Future[Any]()
        self._held.append((future, partial(work, *args, **kwargs)))
        return future

    def write(self) -> None:
        """Does what it was given."""
        held, self._held = self._held, []
        for future, work in held:
            future.set_result(work())

    def lose(self) -> None:
        """Forgets it, as a kill does."""
        self._held.clear()


@dataclass
class _History:
    """What became of groups: trained on, by their step, or left out."""

    trained: dict[int, int] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    """A run: groups start and end, steps train, and it is killed at any moment."""

    schedule: ClassVar[Rule] = AsyncRule(2)
    size: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.disk = _Disk()
        self.directory = tempfile.TemporaryDirectory()
        self.files = Path(self.directory.name) / "groups"
        self.checkpoint = (0, QueueState(next_number=0), _History())
        self.begun_again: set[int] = set()
        self.begun_in_training: set[int] = set()
        self._open(new=True)

    def _open(self, *, new: bool) -> None:
        step, state, history = self.checkpoint
        self.history = deepcopy(history)
        self.store = GroupStore(
            self.files, tasks=tasks_of, checkpoint=step, new=new, threads=self.disk
        )
        self.queue = GroupQueue(
            rule=self.schedule, size=self.size, total_steps=_TOTAL_STEPS, version=step
        )
        stored = {number: self.store.load(number) for number in state.untrained}
        kept = {number: group for number, group in stored.items() if group is not None}
        self.begun_again |= set(self.queue.restore(state, kept))
        self.store.remove_all_before(state.next_number, but=kept)

    def teardown(self) -> None:
        self._flush()
        self.store.close()
        self.loop.close()
        self.directory.cleanup()

    @precondition(lambda self: self.queue.may_start())
    @rule()
    def start(self) -> None:
        number = self.queue.start()
        if self.queue.training:
            self.begun_in_training.add(number)
        if (stored := self.store.load(number)) is not None:
            # It had ended before a kill, though the checkpoint does not know that it began.
            assert stored.birth <= self.checkpoint[0]
            self.queue.running[number] = stored.birth
            self.queue.end(number, stored.group)
            self.begun_again.add(number)

    @precondition(lambda self: self.queue.running)
    @rule(data=st.data(), lost=st.sampled_from([False, False, False, True]))
    def end(self, data: st.DataObject, lost: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.queue.running)))
        birth = self.queue.running[number]
        versions = tuple(sorted({birth, data.draw(st.integers(birth, self.queue.version))}))
        ended = self.queue.end(number, group_of(number, versions=versions))
        if lost and self.schedule.leaves_out:
            self.queue.leave_out(number)
            self.history.left_out.add(number)
        else:
            self.loop.run_until_complete(self._save(ended))

    async def _save(self, ended: Waiting) -> None:
        self.store.save(ended)
        await asyncio.sleep(0)  # the disk has it, and has not written it

    @rule()
    def flush(self) -> None:
        self._flush()

    def _flush(self) -> None:
        self.disk.write()
        self.loop.run_until_complete(self.store.flush())

    @precondition(lambda self: not self.queue.training and self.queue.version < _TOTAL_STEPS)
    @rule()
    def form(self) -> None:
        step, batch = self.queue.next_step, self.queue.form()
        if batch is None:
            return
        assert len(batch) == self.size
        for waiting in batch:
            assert waiting.number not in self.history.trained, "it is trained on twice"
            assert waiting.number not in self.history.left_out
            assert [t.task for t in waiting.group.trajectories] == list(tasks_of(waiting.number))
            self.history.trained[waiting.number] = step
            self._check_age(waiting, step)
        self.disk.write()  # a step waits for the files of its groups
        self.loop.run_until_complete(self.store.trained(batch))

    def _check_age(self, waiting: Waiting, step: int) -> None:
        age = step - 1 - waiting.birth
        match self.schedule:
            case OverlapRule():
                assert waiting.number // self.size + 1 == step
                assert 0 <= age <= 1
                if waiting.number in self.begun_in_training - self.begun_again:
                    assert age == 1
            case AsyncRule(bound):
                assert 0 <= age <= bound

    @precondition(lambda self: self.queue.training)
    @rule(saves=st.booleans())
    def publish(self, saves: bool) -> None:
        step = self.queue.version + 1
        self.queue.published(step)
        if saves:
            self._flush()  # as before every checkpoint
            self.checkpoint = (step, self.queue.state(), deepcopy(self.history))
            self.store.checkpointed(step)

    @rule(damage=st.booleans(), half=st.booleans(), data=st.data())
    def kill(self, damage: bool, half: bool, data: st.DataObject) -> None:
        if half and self.store._writing:
            number = min(self.store._writing)
            (self.files / f"group-{number:010d}.partial").write_bytes(b"half of it")
        self.disk.lose()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        files = sorted(self.files.iterdir())
        if damage and files:
            file = data.draw(st.sampled_from(files))
            file.write_bytes(file.read_bytes()[:-1])
        self.store.close()
        self._open(new=False)

    @invariant()
    def no_row_is_skipped_or_twice(self) -> None:
        queue, history = self.queue, self.history
        places = [*queue.running, *queue.waiting, *history.trained, *history.left_out]
        assert sorted(places) == list(range(queue.next_number))

    @invariant()
    def something_can_happen(self) -> None:
        queue = self.queue
        if queue.version < _TOTAL_STEPS and not (queue.training or queue.running):
            assert queue.may_start() or self.schedule.batch(queue) is not None

    @invariant()
    def files_are_bounded(self) -> None:
        # Those that wait, and those that a step trained on since the checkpoint.
        bound = len(self.queue.waiting) + len(self.history.trained)
        later = self.queue.next_number  # begun by what a kill has undone
        ahead = [f for f in self.files.iterdir() if int(f.name.split("-")[1]) >= later]
        assert len(list(self.files.iterdir())) - len(ahead) <= bound


class OverlapMachine(Machine):
    """The rows of a step are bound to it."""

    schedule = OverlapRule()


class StreamMachine(Machine):
    """Batches of 3, with 2 more groups in work."""

    schedule = StreamRule(0.5)
    size = 3


class FreshMachine(Machine):
    """Async without staleness."""

    schedule = AsyncRule(0)


_SETTINGS = settings(max_examples=15, stateful_step_count=30, deadline=None)
TestOverlap = OverlapMachine.TestCase
TestStream = StreamMachine.TestCase
TestAsync = Machine.TestCase
TestFresh = FreshMachine.TestCase
for case in (TestOverlap, TestStream, TestAsync, TestFresh):
    case.settings = _SETTINGS


class _Runs:
    """Would run on load."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


def test_a_file_of_somebody_else_runs_no_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = pickle.dumps(_Runs())
    crc = zlib.crc32(data).to_bytes(4, "little")
    for content, told in (
        (crc + data, "it is of another version of Treadle"),  # as before version 0.2
        (b"TGR1" + crc + data, "Error parsing message"),
        (b"TGR1" + crc + data[:-1], f"and {zlib.crc32(data):08x} was written"),
    ):
        (tmp_path / "group-0000000000").write_bytes(content)
        store = GroupStore(tmp_path, tasks=tasks_of, checkpoint=1, new=False)
        assert store.load(0) is None
        assert "group-0000000000 cannot be used, so its group begins again: " in caplog.text
        assert told in caplog.messages[-1]
        assert not list(tmp_path.iterdir())


@pytest.mark.asyncio
@pytest.mark.parametrize("of_a_worker", [False, True])
async def test_a_group_that_was_kept_is_as_it_was(tmp_path: Path, of_a_worker: bool) -> None:
    group = group_of(0)
    if of_a_worker:
        arrived = (
            read_trajectory(write_trajectory(t, t.task), t.task, {}) for t in group.trajectories
        )
        group = replace(group, trajectories=tuple(arrived))
    kept = Waiting(number=0, birth=0, group=group)
    store = GroupStore(tmp_path, tasks=tasks_of, checkpoint=0, new=True)
    store.save(kept)
    await store.flush()
    found = store.load(0)
    assert found is not None
    sources = [t.source for each in (kept, found) for t in each.group.trajectories]
    made = [source and source.is_made for source in sources]
    assert made == [False if of_a_worker else None] * 2 + [False] * 2
    assert found == kept == replace(kept, group=group_of(0))


def test_a_group_that_cannot_be_kept_ends_no_run(tmp_path: Path) -> None:
    group = group_of(0)
    odd = replace(group.trajectories[0], answer=cast(str, lambda: "no text"))
    odd_group = replace(group, trajectories=(odd, *group.trajectories[1:]))

    async def keep() -> None:
        store = GroupStore(tmp_path, tasks=tasks_of, checkpoint=0, new=True)
        store.save(Waiting(number=0, birth=0, group=odd_group))
        await store.flush()
        assert store.load(0) is None

    asyncio.run(keep())


@pytest.mark.asyncio
@pytest.mark.timeout(60)
async def test_a_disk_that_stands_still_holds_no_thread_of_the_event_loop(tmp_path: Path) -> None:
    store = GroupStore(tmp_path, tasks=tasks_of, checkpoint=0, new=True)
    groups = [Waiting(number=n, birth=0, group=group_of(n)) for n in range(40)]
    pipes = [tmp_path / f"group-{group.number:010d}.partial" for group in groups]
    for pipe in pipes:
        os.mkfifo(pipe)  # a write waits for who reads
    for group in groups:
        store.save(group)
    assert await asyncio.to_thread(len, pipes) == 40  # more than that pool has threads
    for pipe in pipes:
        assert await asyncio.to_thread(pipe.read_bytes)
    await store.flush()
    store.close()


def test_a_new_run_begins_without_the_groups_of_another(tmp_path: Path) -> None:
    (tmp_path / "group-0000000000").write_bytes(b"of another run")
    GroupStore(tmp_path, tasks=tasks_of, checkpoint=0, new=True)
    assert not list(tmp_path.iterdir())
