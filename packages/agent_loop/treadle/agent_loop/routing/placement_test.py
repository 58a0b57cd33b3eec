"""Properties of the routing policies."""

from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from treadle.agent_loop.routing import session_table
from treadle.agent_loop.routing.placement import HashedSession, Router, StickySession
from treadle.agent_loop.routing.session_table import (
    NoReplica,
    ReplicaEntry,
    ReplicaOrder,
    RoutedSession,
    by_load,
    by_room,
)

ADDRESSES = [f"r{i}" for i in range(4)]
SESSIONS = st.integers(0, 12).map(lambda i: f"s{i}")
AVOID = st.sets(st.sampled_from(ADDRESSES), max_size=2)


class RouterMachine(RuleBasedStateMachine):
    """Any order of picks, finishes, drains, removals and returns, against a plain model."""

    router: StickySession | HashedSession

    def set_up(self, router: StickySession | HashedSession) -> None:
        self.router = router
        self.live = list(router.addresses)
        self.draining: set[str] = set()
        self.pins: dict[str, str] = {}

    def accepting(self, avoid: set[str]) -> set[str]:
        return set(self.live) - self.draining - avoid

    @rule(session=SESSIONS)
    def finish(self, session: str) -> None:
        was_open = self.router.finish(session)
        assert was_open or session not in self.pins
        assert not self.router.finish(session)
        self.pins.pop(session, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        address = data.draw(st.sampled_from(self.live))
        assert self.router.drain(address) == list(self.pins.values()).count(address)
        self.draining.add(address)

    @rule(address=st.sampled_from(ADDRESSES))
    def remove(self, address: str) -> None:
        self.router.remove(address)
        self.live = [a for a in self.live if a != address]
        self.draining.discard(address)
        self.pins = {s: a for s, a in self.pins.items() if a != address}

    @rule(address=st.sampled_from(ADDRESSES))
    def add(self, address: str) -> None:
        self.router.add(address)
        self.draining.discard(address)
        if address not in self.live:
            self.live.append(address)

    @invariant()
    def every_pin_is_at_one_live_replica_and_loads_are_the_pins(self) -> None:
        if not hasattr(self, "router"):
            return
        loads = Counter(self.pins.values())
        assert {a: self.router.load(a) for a in self.router.addresses} == {
            a: loads[a] for a in self.live
        }
        assert self.router.addresses == tuple(self.live)
        assert self.router.draining == self.draining
        assert all(self.router.pinned(s) == a for s, a in self.pins.items())

    def teardown(self) -> None:
        """Drained replicas empty as their sessions finish, and nothing is left behind."""
        if not hasattr(self, "router"):
            return
        for address in self.live:
            self.router.drain(address)
        for session in range(13):
            self.router.finish(f"s{session}")
        assert not any(self.router.load(address) for address in self.live)
        assert self.router.num_sessions == 0
        assert self.router.waiting == ()


class StickyMachine(RouterMachine):
    @initialize(margin=st.integers(1, 3), count=st.integers(1, 4))
    def start(self, margin: int, count: int) -> None:
        self.margin = margin
        self.set_up(StickySession(ADDRESSES[:count], margin=margin))

    @rule(session=SESSIONS, avoid=AVOID)
    def pick(self, session: str, avoid: set[str]) -> None:
        before = dict(self.pins)
        address = self.router.pick(session, avoid=avoid)
        accepting = self.accepting(avoid)
        pinned = before.get(session)
        if address is NoReplica.UNAVAILABLE:
            assert not accepting
            assert pinned is None or pinned in avoid
            return
        assert isinstance(address, str)
        assert address in set(self.live) - avoid
        loads = Counter(a for s, a in before.items() if s != session)
        least = min((loads[a] for a in accepting), default=None)
        if pinned is not None and pinned not in avoid:
            too_busy = least is not None and loads[pinned] - least > self.margin
            assert (address != pinned) == too_busy
        if address != pinned:
            assert address in accepting
            assert loads[address] == least
        self.pins[session] = address


class HashedMachine(RouterMachine):
    @initialize(count=st.integers(1, 4))
    def start(self, count: int) -> None:
        self.set_up(HashedSession(ADDRESSES[:count]))

    @rule(session=SESSIONS, avoid=AVOID, data=st.data())
    def pick(self, session: str, avoid: set[str], data: st.DataObject) -> None:
        address = self.router.pick(session, avoid=avoid)
        accepting = self.accepting(avoid)
        pinned = self.pins.get(session)
        if pinned is not None and pinned not in avoid:
            assert address == pinned
            return
        if address is NoReplica.UNAVAILABLE:
            assert not accepting
            return
        assert isinstance(address, str)
        # Another router, with no history and another order, says the same.
        fresh = HashedSession(data.draw(st.permutations(sorted(accepting))))
        assert address == fresh.pick(session)
        self.pins[session] = address


class BoundedMachine(RuleBasedStateMachine):
    """Contexts that share caches of 10 tokens, and only grow."""

    @initialize(count=st.integers(1, 3))
    def start(self, count: int) -> None:
        self.router = StickySession(ADDRESSES[:count], margin=3, cache_tokens=10)
        self.count = count
        self.lengths: dict[str, int] = {}

    @rule(session=SESSIONS, more=st.integers(0, 4))
    def pick(self, session: str, more: int) -> None:
        before = self.router.pinned(session)
        self.lengths[session] = length = self.lengths.get(session, 1) + more
        place = self.router.pick(session, context_tokens=length)
        if place is NoReplica.FULL:
            assert session in self.router.waiting
            assert self.router.waiting[0] != session or all(
                self.tokens(a) + length > 10 and self.router.load(a) for a in self.router.addresses
            )
            return
        assert isinstance(place, str)
        assert session not in self.router.waiting
        if place != before:
            assert self.tokens(place) <= 10 or self.router.load(place) == 1
        else:
            assert self.tokens(place) <= 11 or self.router.load(place) == 1

    @rule(session=SESSIONS)
    def stop_waiting(self, session: str) -> None:
        self.router.stop_waiting(session)
        assert session not in self.router.waiting

    @rule(session=SESSIONS)
    def finish(self, session: str) -> None:
        assert self.router.finish(session) == (session in self.lengths)
        self.lengths.pop(session, None)

    def tokens(self, address: str) -> int:
        return sum(n for s, n in self.lengths.items() if self.router.pinned(s) == address)

    @invariant()
    def who_waits_has_no_place(self) -> None:
        if hasattr(self, "router"):
            waiting = self.router.waiting
            assert all(self.router.pinned(session) is None for session in waiting)
            assert self.router.oldest_waiting == (waiting[0] if waiting else None)

    def teardown(self) -> None:
        """Nobody starves: as sessions finish, all others get their place, oldest first."""
        if not hasattr(self, "router"):
            return
        for session in self.lengths:
            self.router.pick(session, context_tokens=self.lengths[session])
        while self.lengths:
            for session in self.router.waiting:
                if (
                    self.router.pick(session, context_tokens=self.lengths[session])
                    is NoReplica.FULL
                ):
                    break
            placed = [s for s in self.lengths if self.router.pinned(s) is not None]
            assert placed
            self.finish(placed[0])
        assert self.router.num_sessions == 0


TestSticky = StickyMachine.TestCase
TestHashed = HashedMachine.TestCase
TestBounded = BoundedMachine.TestCase
for case in (TestSticky, TestHashed, TestBounded):
    case.settings = settings(deadline=None, max_examples=50)


STEPS = st.sampled_from(["drop", "up", "up", "grow", "down"])


@settings(deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 3))), st.sets(st.integers(0, 3)))
def test_the_first_replica_is_known_without_a_search(
    steps: list[tuple[str, int]], avoid: set[int]
) -> None:
    orders = {key: ReplicaOrder(key) for key in (by_load, by_room)}
    there = dict[int, ReplicaEntry]()
    for number, (step, which) in enumerate(steps):
        replica = there.get(which)
        if replica is None:
            replica = ReplicaEntry(str(which), number, tuple(orders.values()))
            there[which] = replica
            for order in orders.values():
                order.add(replica)
        elif step == "drop":
            del there[which]
            for order in orders.values():
                order.remove(replica)
        elif step == "up":
            replica.last_chosen = number
            replica.put(RoutedSession(str(number), number, context_tokens=number % 3))
        elif replica.sessions and step == "grow":
            replica.resize(next(iter(replica.sessions.values())), number)
        elif replica.sessions and step == "down":
            replica.drop(next(iter(replica.sessions.values())))
        for key, order in orders.items():
            ranked = sorted((key(each), each.number, which) for which, each in there.items())
            assert order.least() is (there[ranked[0][2]] if ranked else None)
            left = [which for _, _, which in ranked if which not in avoid]
            for share in (1, 16):
                with patch.object(session_table, "_PASSED_SHARE", share):
                    found = order.least_of(lambda r: int(r.address) not in avoid)
                assert found is (there[left[0]] if left else None)


def test_the_oldest_that_waits_is_known_without_a_search() -> None:
    """Sessions that give up and wait again leave nothing behind."""
    router = StickySession(["a"], cache_tokens=10)
    router.pick("holder", context_tokens=10)
    for round_ in range(200):
        for session in ("s0", "s1"):
            assert router.pick(session, context_tokens=1) is NoReplica.FULL
            if session == "s1" or round_ % 2:
                router.stop_waiting(session)
        assert router.oldest_waiting == (None if round_ % 2 else "s0")
    assert len(router._by_age) < 100


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
    assert max(loads, default=0) - min(loads, default=0) <= 1


def test_a_pin_is_broken_past_the_margin() -> None:
    router = StickySession(["a", "b"], margin=2)
    on_a = [f"s{i}" for i in range(8) if router.pick(f"s{i}") == "a"]
    for i in range(8):
        if f"s{i}" not in on_a:
            router.finish(f"s{i}")
    assert [router.load("a"), router.load("b")] == [4, 0]
    assert router.pick(on_a[0]) == "b"
    assert router.pick(on_a[1]) == "a"


@pytest.mark.parametrize("router", [StickySession(), HashedSession()])
def test_no_replica_is_said_and_leaves_nothing_behind(router: Router) -> None:
    assert router.pick("s") is NoReplica.UNAVAILABLE
    assert not router.finish("s")


def test_a_session_that_is_new_here_stays_where_it_has_been() -> None:
    """After a restart of the router: also on a replica that drains, and never on an unknown one."""
    router = StickySession(["a", "b"])
    router.drain("b")
    assert router.pick("s0", at="b") == "b"
    assert router.pick("s1", at="gone") == "a"
    assert router.pick("s0", at="a") == "b"


def test_a_failing_replica_is_left_for_one_without_room() -> None:
    """Its session has a completion under way; it is not made to wait behind others."""
    router = StickySession(["a", "b"], cache_tokens=10)
    assert router.pick("s0", context_tokens=9) == "a"
    assert router.pick("s1", context_tokens=9) == "b"
    assert router.pick("s2", context_tokens=9) is NoReplica.FULL
    assert router.pick("s1", context_tokens=9, avoid={"b"}) == "a"
    assert router.pick("s0", context_tokens=9) == "a"
    assert router.pinned("s1") is None  # the youngest gave way,
    assert router.pick("s1", context_tokens=9) == "b"  # and is older than who waits
    assert router.waiting == ("s2",)


def test_room_is_given_in_the_order_of_age() -> None:
    router = StickySession(["a"], cache_tokens=10)
    assert router.pick("old", context_tokens=8) == "a"
    assert router.pick("young", context_tokens=8) is NoReplica.FULL
    assert router.pick("small", context_tokens=1) is NoReplica.FULL  # "young" is before it
    router.finish("old")
    assert router.pick("small", context_tokens=1) is NoReplica.FULL
    assert router.pick("young", context_tokens=8) == "a"
    assert router.pick("small", context_tokens=1) == "a"


def test_attempts_of_one_trajectory_go_to_one_replica() -> None:
    """Their ids end in random digits, which must not decide in the deterministic mode."""
    router = HashedSession(ADDRESSES)
    for row in range(20):
        assert router.pick(f"row-{row}/0/a1b2") == router.pick(f"row-{row}/0/c3d4")


def test_a_replica_that_comes_or_goes_moves_its_own_share_only() -> None:
    sessions = [f"s{i}" for i in range(200)]
    three, four = HashedSession(ADDRESSES[:3]), HashedSession(ADDRESSES)
    before = {s: three.pick(s) for s in sessions}
    after = {s: four.pick(s) for s in sessions}
    moved = {s for s in sessions if before[s] != after[s]}
    assert {after[s] for s in moved} == {ADDRESSES[3]}
    assert 25 < len(moved) < 75
    assert set(Counter(after.values())) == set(ADDRESSES)


@pytest.mark.parametrize(
    ("addresses", "options", "message"),
    [
        (["a", "a"], {}, "given twice"),
        (["a"], {"margin": 0}, "margin is 0"),
        (["a"], {"cache_tokens": 0}, "cache_tokens is 0"),
    ],
)
def test_bad_settings_are_refused(
    addresses: list[str], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StickySession(addresses, **options)
