"""What a step that waits for its batch does meanwhile; `schedules_test` has whole schedules."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from treadle.trainer.training_loop.schedules.beside_training import _Groups

pytestmark = pytest.mark.asyncio


class Waiting:
    """Groups whose step waits, and what it waits for."""

    def __init__(self) -> None:
        self.servers_changed = asyncio.Event()
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.num_recovered = 0
        self.groups: Any = _Groups.__new__(_Groups)  # a context is not needed for this
        self.groups.changed = asyncio.Event()
        self.groups.sampling = None
        rollout: Any = SimpleNamespace(
            rollout=SimpleNamespace(servers=self),
            troubled=asyncio.Event(),
            recover=self._recover,
        )
        self.groups.rollout = rollout

    async def wait_for_change(self) -> None:
        """As the server pool's."""
        self.asked.set()
        try:
            await self.servers_changed.wait()
        finally:
            self.left.set()

    async def _recover(self) -> None:
        self.num_recovered += 1

    async def begin(self) -> "asyncio.Task[None]":
        """Returns the wait, when it has begun."""
        waiting: asyncio.Task[None] = asyncio.create_task(self.groups._wait_for_change())
        await self.asked.wait()
        return waiting


async def test_a_group_that_changed_ends_the_wait_and_every_part_of_it() -> None:
    case = Waiting()
    waiting = await case.begin()
    case.groups.changed.set()
    await waiting
    assert not case.groups.changed.is_set()
    assert case.num_recovered == 0
    await case.left.wait()


@pytest.mark.parametrize("cause", ["servers", "trouble"])
async def test_servers_that_changed_or_fail_are_seen_to(cause: str) -> None:
    case = Waiting()
    waiting = await case.begin()
    (case.servers_changed if cause == "servers" else case.groups.rollout.troubled).set()
    await waiting
    assert case.num_recovered == 1


async def test_sampling_that_failed_fails_the_wait() -> None:
    case = Waiting()

    async def fail() -> None:
        raise RuntimeError("no server is left")

    case.groups.sampling = asyncio.create_task(fail())
    case.groups.sampling.add_done_callback(lambda _: case.groups.changed.set())
    with pytest.raises(RuntimeError, match="no server is left"):
        await case.groups._wait_for_change()


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    case = Waiting()
    waiting = await case.begin()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await case.left.wait()
