import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.rollout_server.scheduling.admission import Admission, Admitted, Queued, Rejected


class AdmissionMachine(RuleBasedStateMachine):
    """Admission against a list that is sorted in the open."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(max_in_flight=2, max_queued=3)
        self.running: set[int] = set()
        self.queue: list[tuple[int, int]] = []
        self.paused = False
        self.time = itertools.count()

    def started(self, tickets: tuple[int, ...]) -> None:
        for ticket in tickets:
            assert self.queue.pop(0)[1] == ticket
            self.running.add(ticket)

    @rule(priority=st.integers(-2, 2))
    def admit(self, priority: int) -> None:
        room = len(self.running) < 2 and not self.queue and not self.paused
        match self.admission.admit(priority, next(self.time)):
            case Admitted(ticket=ticket):
                assert room
                self.running.add(ticket)
            case Queued(ticket=ticket):
                assert not room
                self.queue.append((-priority, ticket))
                self.queue.sort()
            case Rejected(retry_after_s=delay):
                assert len(self.queue) == 3
                assert delay > 0

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(ticket)
        self.started(self.admission.finish(ticket, next(self.time)))

    @precondition(lambda self: self.queue)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.queue))
        self.queue.remove(entry)
        assert self.admission.cancel(entry[1], next(self.time)) == ()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel_too_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(ticket)
        self.started(self.admission.cancel(ticket, next(self.time)))

    @rule()
    def pause(self) -> None:
        self.paused = True
        self.admission.pause()

    @rule()
    def resume(self) -> None:
        self.paused = False
        self.started(self.admission.resume(next(self.time)))

    @rule()
    def empty_queue(self) -> None:
        assert self.admission.empty_queue() == tuple(ticket for _, ticket in self.queue)
        self.queue.clear()

    @invariant()
    def counts_agree_and_no_place_is_wasted(self) -> None:
        assert self.admission.in_flight == len(self.running) <= 2
        assert self.admission.queued == len(self.queue) <= 3
        assert self.paused or not self.queue or len(self.running) == 2


TestAdmissionMachine = AdmissionMachine.TestCase


def test_cancelled_tickets_do_not_pile_up() -> None:
    admission = Admission(max_in_flight=1, max_queued=1)
    admission.admit(0, 0.0)
    for _ in range(1000):
        verdict = admission.admit(0, 0.0)
        assert isinstance(verdict, Queued)
        admission.cancel(verdict.ticket, 0.0)
    assert len(admission._queue) < 100


@given(service_s=st.floats(0.0, 1e6), slots=st.integers(1, 1000))
def test_the_retry_delay_is_positive_and_bounded(service_s: float, slots: int) -> None:
    admission = Admission(max_in_flight=slots, max_queued=0)
    verdict = admission.admit(0, 0.0)
    assert isinstance(verdict, Admitted)
    admission.finish(verdict.ticket, service_s)
    assert 0.05 <= admission.retry_after_s() <= 30.0


def test_the_retry_delay_is_the_time_between_completions() -> None:
    admission = Admission(max_in_flight=4, max_queued=8)
    for _ in range(5):
        verdict = admission.admit(0, 0.0)
        assert isinstance(verdict, Admitted)
        admission.finish(verdict.ticket, 8.0)
    assert admission.retry_after_s() == pytest.approx(2.0)
