"""What a loop worker does alone; tests/e2e has real workers."""

import asyncio
import logging
from dataclasses import dataclass, field
from typing import cast

import pytest

from treadle.agent_loop import AgentTask, Message
from treadle.agent_loop.rpc.driver_stream import ProgramEnd
from treadle.loop_worker.v1 import loop_worker_service_pb2 as pb
from treadle.trainer.rollout.workers.messages import GivenTask
from treadle.trainer.rollout.workers.worker import _MAX_UNSENT, _SLICE, _Tasks, _ToDriver


@dataclass
class Unread:
    """A stream to a driver that reads when a test says so."""

    sent: list[pb.Event] = field(default_factory=list)
    num_unsent: int = 0

    def send(self, message: pb.Event) -> None:
        self.sent.append(message)
        self.num_unsent += 1


def test_a_driver_that_does_not_read_is_sent_no_more_lines_than_it_may_have_to_read() -> None:
    stream = Unread()
    handler = _ToDriver(cast(ProgramEnd, stream))

    def warn(text: str) -> None:
        handler.emit(logging.LogRecord("treadle", logging.WARNING, "f", 1, text, (), None))

    for _ in range(_MAX_UNSENT + 7):
        warn("again")
    assert len(stream.sent) == _MAX_UNSENT
    stream.num_unsent = 0
    warn("now")
    warn("later")
    assert [message.warned.message.decode() for message in stream.sent[-2:]] == [
        "now (and 7 lines before it, which only the worker's log has)",
        "later",
    ]


@pytest.mark.asyncio
async def test_tasks_that_are_given_at_once_begin_in_slices() -> None:
    """Else the event loop would stand still while thousands begin."""
    count = 3 * _SLICE
    rows = (
        AgentTask(
            task_id=f"row {number}",
            sample_index=number,
            rollout_index=0,
            loop="any",
            messages=(Message(role="user", content="?"),),
        )
        for number in range(count)
    )
    tasks = _Tasks(count)
    tasks.give([GivenTask(number, task, {}) for number, task in enumerate(rows)])
    num_begun = 0

    async def take() -> None:
        nonlocal num_begun
        for _ in range(count):
            await anext(tasks)
            num_begun += 1

    taking = asyncio.create_task(take())
    seen = []
    while not taking.done():
        seen.append(num_begun)
        await asyncio.sleep(0)
    steps = {after - before for before, after in zip(seen, [*seen[1:], count], strict=True)}
    assert steps <= {0, _SLICE}
