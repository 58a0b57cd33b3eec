"""Two Begins of one update from files: one read, one answer."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from treadle.rollout_server.config.schema import ServerConfig, WeightsConfig
from treadle.rollout_server.engine import ElementType, InFlightPolicy, ModelInfo, TensorSpec
from treadle.rollout_server.engines.fake.engine import FakeEngine
from treadle.rollout_server.errors import FileMissing, InvalidField, RolloutServerError
from treadle.rollout_server.replica import Replica
from treadle.rollout_server.testing import FakeClock
from treadle.rollout_server.updates import weight_updater
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.files import WeightFiles
from treadle.rollout_server.updates.staging import Assembler
from treadle.rollout_server.updates.weight_update import UpdateState, WeightUpdate

TENSORS = tuple(TensorSpec(name=n, element_type=ElementType.FLOAT32, shape=(2,)) for n in "ab")
MODEL = ModelInfo(architecture="fake", vocab_size=64, context_length=64)
FILES = WeightFiles(directory="1", crc32=(1, 2))


class Disk:
    """Replaces `stage_files`: reads when it may, and counts its calls."""

    def __init__(self) -> None:
        self.readings = 0
        self.error: RolloutServerError | None = None
        self.begun = asyncio.Event()
        self.may_read = threading.Event()
        self._loop = asyncio.get_running_loop()

    def stage_files(
        self, files: WeightFiles, assembler: Assembler, *, filled: Callable[[int], None], **_: Any
    ) -> None:
        self.readings += 1
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.may_read.wait(60)
        if self.error is not None:
            raise self.error
        for index in range(len(TENSORS)):
            assembler.write(index, 0, bytes(8))
            filled(index)


@pytest_asyncio.fixture
async def disk(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Disk]:
    """Yields the disk that every replica reads from."""
    disk = Disk()
    monkeypatch.setattr(weight_updater, "stage_files", disk.stage_files)
    yield disk
    disk.may_read.set()


@pytest_asyncio.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    """Yields a replica in front of a fake engine."""
    clock = FakeClock()
    replica = Replica(ServerConfig(weights=WeightsConfig(directory=tmp_path)), clock)
    replica.serve(FakeEngine(model=MODEL, parameters=TENSORS, clock=clock))
    yield replica
    await replica.aclose()


def announced(update_id: str = "u", **how: Any) -> Begin:
    return Begin(update_id=update_id, weight_version=1, tensors=TENSORS, lease_s=60.0, **how)


def begin(
    replica: Replica, files: WeightFiles = FILES, in_place: InFlightPolicy | None = None
) -> asyncio.Task[WeightUpdate]:
    return asyncio.create_task(replica.updates.begin(announced(in_place=in_place, source=files)))


@pytest.mark.asyncio
@pytest.mark.parametrize("in_place", [None, InFlightPolicy.DRAIN])
async def test_files_are_read_once_and_a_caller_that_gives_up_does_not_end_it(
    disk: Disk, replica: Replica, in_place: InFlightPolicy | None
) -> None:
    first, second = begin(replica, in_place=in_place), begin(replica, in_place=in_place)
    await disk.begun.wait()
    first.cancel()
    third = begin(replica, in_place=in_place)
    await asyncio.wait({first})
    disk.may_read.set()
    update = await second
    assert await third is update
    assert (disk.readings, update.received) == (1, (8, 8))
    assert update.state is UpdateState.COMPLETE


@pytest.mark.asyncio
async def test_a_reading_goes_on_when_everyone_has_given_up(disk: Disk, replica: Replica) -> None:
    only = begin(replica)
    await disk.begun.wait()
    only.cancel()
    await asyncio.wait({only})
    disk.may_read.set()
    assert (await begin(replica)).received == (8, 8)
    assert disk.readings == 1


@pytest.mark.asyncio
async def test_a_reading_that_fails_fails_for_both_and_drops_the_update(
    disk: Disk, replica: Replica
) -> None:
    disk.error = FileMissing("1", "no such directory")
    both = [begin(replica), begin(replica)]
    await disk.begun.wait()
    disk.may_read.set()
    assert await asyncio.gather(*both, return_exceptions=True) == [disk.error] * 2
    assert replica.current_update.live is None
    disk.error = None
    assert (await begin(replica)).received == (8, 8)
    assert disk.readings == 2


@pytest.mark.asyncio
async def test_other_files_are_another_update(disk: Disk, replica: Replica) -> None:
    disk.may_read.set()
    await begin(replica)
    with pytest.raises(InvalidField, match="expected a new id"):
        await begin(replica, WeightFiles(directory="2", crc32=(1, 2)))


@pytest.mark.asyncio
async def test_an_update_that_is_dropped_while_it_is_read_can_begin_anew(
    disk: Disk, replica: Replica
) -> None:
    old = begin(replica)
    await disk.begun.wait()
    await replica.updates.abort("u")
    new = begin(replica)
    disk.may_read.set()
    assert (await new).received == (8, 8)
    with pytest.raises(RolloutServerError, match="'u' was aborted"):
        await old


@pytest.mark.asyncio
async def test_aborting_an_update_again_does_not_wait_for_the_next_one(
    disk: Disk, replica: Replica
) -> None:
    await replica.updates.begin(announced("old"))
    await replica.updates.abort("old")
    disk.may_read.set()
    await begin(replica, in_place=InFlightPolicy.DRAIN)
    await replica.updates.abort("old")
    await replica.updates.abort("u")
