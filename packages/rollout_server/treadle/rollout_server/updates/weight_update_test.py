"""The transaction of an update as a state machine, against a model kept in the open."""

import zlib
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.rollout_server.engine import ElementType, InFlightPolicy, TensorSpec
from treadle.rollout_server.errors import (
    InvalidField,
    UpdateIncomplete,
    UpdateInProgress,
    UpdateUnknown,
)
from treadle.rollout_server.testing import FakeClock
from treadle.rollout_server.updates.begin import Begin
from treadle.rollout_server.updates.weight_update import CurrentUpdate, UpdateState, WeightUpdate

TENSORS = tuple(
    TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=(1,)) for name in "ab"
)
LEASE_S = 10.0
IDS = st.sampled_from(["u", "v"])


def announced(update_id: str = "u", **changes: Any) -> Begin:
    values: dict[str, Any] = {"weight_version": 1, "tensors": TENSORS, "lease_s": LEASE_S}
    return Begin(update_id=update_id, **values | changes)


class UpdateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.current = CurrentUpdate(self.clock, max_chunk_bytes=64)
        self.live: str | None = None
        self.update: WeightUpdate | None = None
        self.held: set[int] = set()
        self.committing = False
        self.news = 0.0
        self.serves: str | None = None

    def gone(self, update_id: str) -> bool:
        return self.live != update_id

    @rule(update_id=IDS)
    def begin(self, update_id: str) -> None:
        if update_id == self.serves:
            known = self.current.begin(announced(update_id))
            assert (known.state, known.received) == (UpdateState.COMMITTED, (4, 4))
            return
        if self.live not in (None, update_id):
            with pytest.raises(UpdateInProgress) as caught:
                self.current.begin(announced(update_id))
            assert caught.value.update_id == self.live
            assert 0 < caught.value.lease_left_s <= LEASE_S
            return
        update = self.current.begin(announced(update_id))
        if self.live is None:
            self.held = set()
        else:
            assert update is self.update
        self.live, self.update, self.news = update_id, update, self.clock.time()

    @rule(update_id=IDS, index=st.integers(0, 1))
    def push(self, update_id: str, index: int) -> None:
        if self.gone(update_id):
            with pytest.raises(UpdateUnknown):
                self.current.find(update_id)
            return
        update = self.current.find(update_id)
        if index not in self.held and not self.committing:
            update.incoming.accept(index, 0, zlib.crc32(b"abcd"), b"abcd")
            self.held.add(index)
        self.news = self.clock.time()

    @precondition(lambda self: self.live and not self.committing)
    @rule()
    def begin_commit(self) -> None:
        assert self.update is not None
        if len(self.held) < 2:
            with pytest.raises(UpdateIncomplete):
                self.update.begin_commit()
        else:
            self.update.begin_commit()
            assert len(list(self.update.incoming.assembler.named_tensors())) == 2
            self.committing = True

    @precondition(lambda self: self.committing)
    @rule(taken=st.booleans())
    def end_commit(self, taken: bool) -> None:
        assert self.update is not None and self.live is not None
        self.committing = False
        if not taken:
            self.update.commit_failed()
            self.update.renew(self.clock.time())
            self.news = self.clock.time()
            return
        self.current.committed()
        assert self.current.committed_version(self.live) == 1
        self.serves, self.live = self.live, None

    @precondition(lambda self: not self.committing)
    @rule(update_id=IDS)
    def abort(self, update_id: str) -> None:
        try:
            self.current.abort(update_id)
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
    def one_update_or_none(self) -> None:
        live = self.current.live
        assert (None if live is None else live.update_id) == self.live
        if self.update is None:
            return
        if self.live is None:
            assert self.update.state.ended
            with pytest.raises(UpdateUnknown):
                _ = self.update.incoming.assembler
        elif self.committing:
            assert self.update.state is UpdateState.COMMITTING
        else:
            complete = len(self.held) == 2
            assert self.update.state is (UpdateState.COMPLETE if complete else UpdateState.OPEN)


TestUpdateMachine = UpdateMachine.TestCase


def test_a_silent_trainer_loses_its_update_by_the_timer_alone() -> None:
    clock = FakeClock()
    current = CurrentUpdate(clock, max_chunk_bytes=64)
    update = current.begin(announced())
    clock.advance(6.0)
    current.find("u").incoming.accept(0, 0, zlib.crc32(b"abcd"), b"abcd")
    states = []
    for seconds in (6.0, 4.0):
        clock.advance(seconds)
        states.append(update.state)
    assert states == [UpdateState.OPEN, UpdateState.EXPIRED]
    assert clock.next_timer is None
    with pytest.raises(UpdateUnknown, match="'u' ran out of its lease: begin again"):
        current.find("u")


def test_the_lease_stands_still_while_the_server_works() -> None:
    clock = FakeClock()
    current = CurrentUpdate(clock, max_chunk_bytes=64)
    update = current.begin(announced())
    with update.working(clock):
        clock.advance(100.0)
        assert update.state is UpdateState.OPEN
    clock.advance(9.0)
    assert update.lease_left_s(clock.time()) == 1.0


@pytest.mark.parametrize(
    "changed", [{"weight_version": 2}, {"keep_base": True}, {"in_place": InFlightPolicy.DRAIN}]
)
def test_an_id_cannot_be_used_for_another_update(changed: dict[str, Any]) -> None:
    current = CurrentUpdate(FakeClock(), max_chunk_bytes=64)
    current.begin(announced())
    with pytest.raises(InvalidField, match="update_id is 'u', expected a new id"):
        current.begin(announced(**changed))


@pytest.mark.parametrize("in_place", [None, InFlightPolicy.DRAIN])
def test_a_repeat_may_name_another_lease_and_policy(in_place: InFlightPolicy | None) -> None:
    current = CurrentUpdate(FakeClock(), max_chunk_bytes=64)
    update = current.begin(announced(in_place=in_place))
    other = in_place and InFlightPolicy.INTERRUPT
    assert current.begin(announced(in_place=other, lease_s=2 * LEASE_S)) is update
