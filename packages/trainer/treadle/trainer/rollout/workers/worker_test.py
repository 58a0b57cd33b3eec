"""What a loop worker does alone; tests/e2e has real workers."""

import logging
from dataclasses import dataclass, field
from typing import cast

from treadle.trainer.rollout.workers.link import Link
from treadle.trainer.rollout.workers.messages import Warned
from treadle.trainer.rollout.workers.worker import _MAX_UNSENT, _ToDriver


@dataclass
class Unread:
    """A link to a driver that reads when a test says so."""

    sent: list[Warned] = field(default_factory=list)
    num_unsent: int = 0

    def send(self, message: Warned) -> None:
        self.sent.append(message)
        self.num_unsent += 1


def test_a_driver_that_does_not_read_is_sent_no_more_lines_than_it_may_have_to_read() -> None:
    link = Unread()
    handler = _ToDriver(cast(Link, link))

    def warn(text: str) -> None:
        handler.emit(logging.LogRecord("treadle", logging.WARNING, "f", 1, text, (), None))

    for _ in range(_MAX_UNSENT + 7):
        warn("again")
    assert len(link.sent) == _MAX_UNSENT
    link.num_unsent = 0
    warn("now")
    warn("later")
    assert [message.message for message in link.sent[-2:]] == [
        "now (and 7 lines before it, which only the worker's log has)",
        "later",
    ]
