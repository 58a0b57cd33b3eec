"""A small cluster, and what must hold of any."""

import pytest
from cluster_sim import Setting, settings, short_trace, simulate, table_bytes
from routing_replay import COST
from routing_sim import Session


@pytest.fixture(scope="module")
def trace() -> list[Session]:
    return short_trace(200, 3)


def test_few_sessions_leave_servers_idle_and_many_use_them(trace: list[Session]) -> None:
    few = simulate(Setting(servers=4, in_flight=2, sessions=200), trace).replay
    many = simulate(Setting(servers=4, in_flight=100, sessions=200), trace).replay
    assert few.idle > 0.5 > many.idle
    assert few.utilisation < 2 / (4 * COST.max_running) < many.utilisation < 1
    assert many.wall_s < few.wall_s


def test_each_turn_and_each_end_is_a_decision(trace: list[Session]) -> None:
    outcome = simulate(Setting(servers=4, in_flight=50, sessions=200), trace)
    assert outcome.decisions == sum(len(session.turns) + 1 for session in trace)
    assert outcome.sampled_tokens > 0


def test_settings_grow_to_the_largest_cluster() -> None:
    found = settings(1024, 100_000)
    assert (found[-1].servers, found[-1].in_flight) == (1024, 100_000)
    assert all(s.in_flight <= s.sessions for s in found)
    assert {s.servers for s in found} == {16, 128, 1024}


def test_the_table_is_small() -> None:
    assert 100 < table_bytes(8, 500) < 2000
