"""Properties of the routing policies."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle.agent_loop import StickySession

ADDRESSES = [f"r{i}" for i in range(4)]


class RoutingMachine(RuleBasedStateMachine):
    """Any order of picks, finishes, drains, removals and returns."""

    @initialize(margin=st.integers(1, 3), count=st.integers(1, 4))
    def start(self, margin: int, count: int) -> None:
        self.margin = margin
        self.router = StickySession(ADDRESSES[:count], margin=margin)
        self.live = set(ADDRESSES[:count])
        self.draining: set[str] = set()
        self.pins: dict[str, str] = {}

    @rule(session=st.integers(0, 12), avoid=st.sets(st.sampled_from(ADDRESSES), max_size=2))
    def pick(self, session: int, avoid: set[str]) -> None:
        name = f"s{session}"
        before = dict(self.pins)
        address = self.router.pick(name, avoid=avoid)
        open_ones = self.live - self.draining - avoid
        pinned = before.get(name)
        if address is None:
            assert not open_ones
            assert pinned is None or pinned in avoid
            return
        assert address in self.live - avoid
        loads = Counter(a for s, a in before.items() if s != name)
        least = min((loads[a] for a in open_ones), default=None)
        if pinned is not None and pinned not in avoid:
            too_busy = least is not None and loads[pinned] - least > self.margin
            assert (address != pinned) == too_busy
        if address != pinned:
            assert address in open_ones
            assert loads[address] == least
        self.pins[name] = address

    @rule(session=st.integers(0, 12))
    def finish(self, session: int) -> None:
        self.router.finish(f"s{session}")
        self.pins.pop(f"s{session}", None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(sorted(self.live)))
        assert self.router.drain(address) == list(self.pins.values()).count(address)
        self.draining.add(address)

    @rule(address=st.sampled_from(ADDRESSES))
    def remove(self, address: str) -> None:
        self.router.remove(address)
        self.live.discard(address)
        self.draining.discard(address)
        self.pins = {s: a for s, a in self.pins.items() if a != address}

    @rule(address=st.sampled_from(ADDRESSES))
    def add(self, address: str) -> None:
        self.router.add(address)
        self.live.add(address)
        self.draining.discard(address)

    @invariant()
    def loads_are_the_unfinished_sessions(self) -> None:
        loads = Counter(self.pins.values())
        assert {a: self.router.load(a) for a in self.router.addresses} == {
            a: loads[a] for a in self.live
        }


TestRouting = RoutingMachine.TestCase
TestRouting.settings = settings(deadline=None, max_examples=50)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40))
def test_no_replica_starves_under_light_traffic(count: int, rounds: int) -> None:
    """One session at a time: every window of `count` sessions reaches every replica."""
    router = StickySession(ADDRESSES[:count])
    seen = []
    for i in range(rounds + count):
        seen.append(router.pick(f"s{i}"))
        router.finish(f"s{i}")
    for start in range(rounds):
        assert set(seen[start : start + count]) == set(ADDRESSES[:count])


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 60))
def test_new_sessions_are_spread_evenly(count: int, sessions: int) -> None:
    router = StickySession(ADDRESSES[:count])
    for i in range(sessions):
        router.pick(f"s{i}")
    loads = [router.load(a) for a in router.addresses]
    assert max(loads) - min(loads) <= 1


def test_a_pin_is_broken_past_the_margin() -> None:
    router = StickySession(["a", "b"], margin=2)
    on_a = [f"s{i}" for i in range(8) if router.pick(f"s{i}") == "a"]
    for i in range(8):
        if f"s{i}" not in on_a:
            router.finish(f"s{i}")
    assert [router.load("a"), router.load("b")] == [4, 0]
    assert router.pick(on_a[0]) == "b"
    assert router.pick(on_a[1]) == "a"


def test_no_replica_is_none() -> None:
    assert StickySession().pick("s") is None


@pytest.mark.parametrize(
    ("addresses", "margin", "message"), [(["a", "a"], 1, "given twice"), (["a"], 0, "margin is 0")]
)
def test_bad_settings_are_refused(addresses: list[str], margin: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StickySession(addresses, margin=margin)
