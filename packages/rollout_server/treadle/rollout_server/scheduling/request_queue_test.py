import asyncio

import pytest

from treadle.rollout_server.errors import Overloaded, ShuttingDown
from treadle.rollout_server.scheduling.admission import Admission
from treadle.rollout_server.scheduling.request_queue import RequestQueue
from treadle.rollout_server.testing import FakeClock


class Visitor:
    """A task that stays inside the queue until it is let go."""

    def __init__(self, queue: RequestQueue, priority: int = 0) -> None:
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(queue, priority))

    async def _visit(self, queue: RequestQueue, priority: int) -> None:
        async with queue.slot(priority) as slot:
            self.start = slot.started
            self.inside.set()
            await self.leave.wait()

    async def go(self) -> None:
        self.leave.set()
        await self.task


def gate_of(slots: int, queue: int) -> tuple[RequestQueue, Admission]:
    admission = Admission(max_in_flight=slots, max_queued=queue)
    return RequestQueue(admission, FakeClock()), admission


@pytest.mark.asyncio
async def test_a_slot_that_is_left_goes_to_the_next_call() -> None:
    queue, _ = gate_of(1, 2)
    first = Visitor(queue)
    await first.inside.wait()
    second, urgent = Visitor(queue), Visitor(queue, priority=1)
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="1 completions in flight and 2 queued"):
        async with queue.slot(0):
            pass
    await first.go()
    await urgent.inside.wait()
    assert not second.inside.is_set()
    await urgent.go()
    await second.inside.wait()
    await second.go()


@pytest.mark.asyncio
async def test_a_cancelled_wait_makes_room_in_the_queue() -> None:
    queue, admission = gate_of(1, 1)
    first = Visitor(queue)
    await first.inside.wait()
    second = Visitor(queue)
    await asyncio.sleep(0)
    second.task.cancel()
    await asyncio.wait({second.task})
    assert admission.queued == 0
    await first.go()
    assert admission.in_flight == 0


@pytest.mark.asyncio
async def test_a_slot_given_to_a_call_that_is_being_cancelled_is_passed_on() -> None:
    queue, admission = gate_of(1, 2)
    first = Visitor(queue)
    await first.inside.wait()
    second, third = Visitor(queue), Visitor(queue)
    await asyncio.sleep(0)
    first.leave.set()
    await first.task  # the second was given the place and has not run yet
    second.task.cancel()
    await third.inside.wait()
    await third.go()
    assert admission.in_flight == 0


@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_at_its_turn_passes_the_slot_on() -> None:
    queue, admission = gate_of(1, 2)
    first = Visitor(queue)
    await first.inside.wait()
    second, third = Visitor(queue), Visitor(queue)
    await asyncio.sleep(0)
    first.leave.set()
    second.task.cancel()  # the first leaves before the second runs
    await first.task
    await third.inside.wait()
    await third.go()
    assert (admission.in_flight, admission.queued) == (0, 0)


@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_while_others_are_rejected_blocks_no_call() -> None:
    queue, admission = gate_of(1, 2)
    queue.pause_admission()
    first, second = Visitor(queue), Visitor(queue)
    await asyncio.sleep(0)
    first.task.cancel()
    queue.reject_waiting(ShuttingDown())
    with pytest.raises(ShuttingDown):
        await second.task
    with pytest.raises(asyncio.CancelledError):
        await first.task
    assert (admission.in_flight, admission.queued) == (0, 0)


@pytest.mark.asyncio
async def test_calls_queue_while_admission_is_paused_and_can_be_rejected() -> None:
    queue, admission = gate_of(4, 4)
    queue.pause_admission()
    waiting = Visitor(queue)
    await asyncio.sleep(0)
    assert admission.queued == 1
    queue.reject_waiting(ShuttingDown())
    with pytest.raises(ShuttingDown):
        await waiting.task
    later = Visitor(queue)
    await asyncio.sleep(0)
    queue.resume_admission()
    await later.inside.wait()
    await later.go()


@pytest.mark.asyncio
async def test_an_admitted_call_that_has_not_started_is_rejected() -> None:
    queue, admission = gate_of(2, 2)
    first, second = Visitor(queue), Visitor(queue)
    await first.inside.wait()
    await second.inside.wait()
    first.start()
    queue.reject_waiting(ShuttingDown())
    with pytest.raises(ShuttingDown):
        await second.task
    await first.go()
    assert (admission.in_flight, admission.queued) == (0, 0)


@pytest.mark.asyncio
async def test_the_call_that_rejects_the_others_is_not_cancelled() -> None:
    queue, admission = gate_of(2, 2)
    other = Visitor(queue)
    await other.inside.wait()
    with pytest.raises(ValueError, match="why it does"):
        async with queue.slot(0):
            queue.reject_waiting(ShuttingDown())
            raise ValueError("why it does")
    await asyncio.sleep(0)  # here a cancellation would come
    with pytest.raises(ShuttingDown):
        await other.task
    assert (admission.in_flight, admission.queued) == (0, 0)


@pytest.mark.asyncio
async def test_a_slot_given_to_a_call_that_is_being_rejected_is_not_entered() -> None:
    queue, admission = gate_of(1, 1)
    first = Visitor(queue)
    await first.inside.wait()
    second = Visitor(queue)
    await asyncio.sleep(0)
    first.leave.set()
    await asyncio.sleep(0)  # the second was given the place and has not run yet
    assert first.task.done() and not second.inside.is_set()
    queue.pause_admission()
    queue.reject_waiting(ShuttingDown())
    with pytest.raises(ShuttingDown):
        await second.task
    assert not second.inside.is_set()
    assert (admission.in_flight, admission.queued) == (0, 0)


@pytest.mark.asyncio
async def test_a_call_that_is_cancelled_and_rejected_is_cancelled() -> None:
    queue, _ = gate_of(1, 1)
    visitor = Visitor(queue)
    await visitor.inside.wait()
    visitor.task.cancel()
    queue.reject_waiting(ShuttingDown())
    with pytest.raises(asyncio.CancelledError):
        await visitor.task
