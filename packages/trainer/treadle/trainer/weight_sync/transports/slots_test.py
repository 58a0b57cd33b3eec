import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from treadle.trainer.weight_sync.transports.slots import Slots

_READERS = ["a", "b", "c"]
_SLOTS = st.integers(0, 1)


class SlotsMachine(RuleBasedStateMachine):
    """Against a model kept in the open: (slot, reader) pairs that are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(2, _READERS)
        self.here = set(_READERS)
        self.reading: set[tuple[int, str]] = set()

    @rule(slot=_SLOTS)
    def fill(self, slot: int) -> None:
        if not any(number == slot for number, _ in self.reading):
            self.slots.take(slot)
            self.slots.hand_out(slot)
            self.reading |= {(slot, reader) for reader in self.here}

    @rule(slot=_SLOTS, reader=st.sampled_from(_READERS))
    def give_back(self, slot: int, reader: str) -> None:
        if (slot, reader) in self.reading:
            self.slots.give_back(reader, slot)
            self.reading.remove((slot, reader))
        else:
            with pytest.raises(ValueError, match=f"{reader} gave back slot {slot}"):
                self.slots.give_back(reader, slot)

    @rule(reader=st.sampled_from(_READERS))
    def leave(self, reader: str) -> None:
        self.slots.leave(reader)
        self.here.discard(reader)
        self.reading = {(slot, other) for slot, other in self.reading if other != reader}

    @invariant()
    def those_who_are_here_are_known(self) -> None:
        assert self.slots.readers == self.here


TestSlotsMachine = SlotsMachine.TestCase


def test_a_slot_is_waited_for_until_the_last_reader_is_done_or_gone() -> None:
    slots = Slots(1, ["done", "gone"])
    slots.take(0)
    slots.hand_out(0)
    taken = threading.Event()

    def take() -> None:
        slots.take(0)
        taken.set()

    thread = threading.Thread(target=take)
    thread.start()
    slots.give_back("done", 0)
    assert not taken.is_set()
    slots.leave("gone")
    taken.wait()
    thread.join()


def test_a_slot_that_does_not_exist_is_refused() -> None:
    slots = Slots(1, ["a"])
    with pytest.raises(ValueError, match="slot 7"):
        slots.give_back("a", 7)
