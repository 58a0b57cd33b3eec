"""The update slot and its session as one state machine, against a model kept in the open."""

import zlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.errors import (
    InvalidField,
    UpdateIncomplete,
    UpdateInProgress,
    UpdateUnknown,
)
from treadle.rollout_server.testing import FakeClock
from treadle.rollout_server.updates.current_update import UpdateSlot
from treadle.rollout_server.updates.weight_update import UpdateSession, UpdateState

TENSORS = tuple(
    TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=(1,)) for name in "ab"
)
LEASE_S = 10.0
IDS = st.sampled_from(["u", "v"])


class UpdateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.slot = UpdateSlot(self.clock, max_chunk_bytes=64)
        self.live: str | None = None
        self.session: UpdateSession | None = None
        self.held: set[int] = set()
        self.committing = False
        self.news = 0.0
        self.serves: str | None = None

    def gone(self, update_id: str) -> bool:
        return self.live != update_id

    @rule(update_id=IDS)
    def begin(self, update_id: str) -> None:
        if update_id == self.serves:
            known = self.slot.begin(update_id, 1, TENSORS, LEASE_S)
            assert (known.state, known.received) == (UpdateState.COMMITTED, (4, 4))
            return
        if self.live not in (None, update_id):
            with pytest.raises(UpdateInProgress) as caught:
                self.slot.begin(update_id, 1, TENSORS, LEASE_S)
            assert caught.value.update_id == self.live
            assert 0 < caught.value.lease_left_s <= LEASE_S
            return
        session = self.slot.begin(update_id, 1, TENSORS, LEASE_S)
        if self.live is None:
            self.held = set()
        else:
            assert session is self.session
        self.live, self.session, self.news = update_id, session, self.clock.time()

    @rule(update_id=IDS, index=st.integers(0, 1))
    def push(self, update_id: str, index: int) -> None:
        if self.gone(update_id):
            with pytest.raises(UpdateUnknown):
                self.slot.find(update_id)
            return
        session = self.slot.find(update_id)
        if index not in self.held and not self.committing:
            session.accept(index, 0, zlib.crc32(b"abcd"), b"abcd", now=self.clock.time())
            self.held.add(index)
        self.news = self.clock.time()

    @precondition(lambda self: self.live and not self.committing)
    @rule()
    def begin_commit(self) -> None:
        assert self.session is not None
        if len(self.held) < 2:
            with pytest.raises(UpdateIncomplete):
                self.session.begin_commit()
        else:
            self.session.begin_commit()
            assert len(list(self.session.assembler.named_tensors())) == 2
            self.committing = True

    @precondition(lambda self: self.committing)
    @rule(taken=st.booleans())
    def end_commit(self, taken: bool) -> None:
        assert self.session is not None and self.live is not None
        self.committing = False
        if not taken:
            self.session.commit_failed()
            self.session.renew(self.clock.time())
            self.news = self.clock.time()
            return
        self.slot.committed()
        assert self.slot.committed_version(self.live) == 1
        self.serves, self.live = self.live, None

    @precondition(lambda self: not self.committing)
    @rule(update_id=IDS)
    def abort(self, update_id: str) -> None:
        try:
            self.slot.abort(update_id)
        except UpdateUnknown:
            assert self.gone(update_id)
        else:
            if self.live == update_id:
                self.live = None

    @rule(seconds=st.sampled_from([1.0, 9.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        if self.live and not self.committing and self.clock.time() - self.news >= LEASE_S:
            self.live = None

    @invariant()
    def one_session_or_none(self) -> None:
        live = self.slot.session
        assert (None if live is None else live.update_id) == self.live
        if self.session is None:
            return
        if self.live is None:
            assert self.session.state.ended
            with pytest.raises(UpdateUnknown):
                _ = self.session.assembler
        elif self.committing:
            assert self.session.state is UpdateState.COMMITTING
        else:
            complete = len(self.held) == 2
            assert self.session.state is (UpdateState.COMPLETE if complete else UpdateState.OPEN)


TestUpdateMachine = UpdateMachine.TestCase


def test_a_silent_trainer_loses_its_update_by_the_timer_alone() -> None:
    clock = FakeClock()
    slot = UpdateSlot(clock, max_chunk_bytes=64)
    session = slot.begin("u", 1, TENSORS, 10.0)
    clock.advance(6.0)
    session.accept(0, 0, zlib.crc32(b"abcd"), b"abcd", now=clock.time())
    states = []
    for seconds in (6.0, 4.0):
        clock.advance(seconds)
        states.append(session.state)
    assert states == [UpdateState.OPEN, UpdateState.EXPIRED]
    assert clock.next_timer is None
    with pytest.raises(UpdateUnknown, match="'u' ran out of its lease: begin again"):
        slot.find("u")


def test_the_lease_stands_still_while_the_server_works() -> None:
    clock = FakeClock()
    slot = UpdateSlot(clock, max_chunk_bytes=64)
    session = slot.begin("u", 1, TENSORS, 10.0)
    with session.working(clock):
        clock.advance(100.0)
        assert session.state is UpdateState.OPEN
    clock.advance(9.0)
    assert session.lease_left_s(clock.time()) == 1.0


@pytest.mark.parametrize(
    "changed", [{"weight_version": 2}, {"keep_base": True}, {"in_place": True}]
)
def test_an_id_cannot_be_used_for_another_update(changed: dict[str, Any]) -> None:
    slot = UpdateSlot(FakeClock(), max_chunk_bytes=64)
    announced: dict[str, Any] = {"weight_version": 1, "tensors": TENSORS, "lease_s": 10.0}
    slot.begin("u", **announced)
    with pytest.raises(InvalidField, match="update_id is 'u', expected a new id"):
        slot.begin("u", **announced | changed)
