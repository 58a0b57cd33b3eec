"""The simulated training is a training: every group once, as its schedule says."""

from dataclasses import replace

import pytest
from cluster_limits import Costs, limits_of
from cluster_sim import training, training_trace
from routing_replay import COST
from schedule_sim import SCHEDULES, Run, run_training
from simulated_cluster import SimulatedServer

from treadle.rollout.v1 import weight_sync_service_pb2 as pb

_RUN = training(4, steps=6, train_s=20.0, deaths_per_hour=1e-6)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    trace = training_trace(_RUN, 2)
    return {name: run_training(rule(), _RUN, trace, COST) for name, rule in SCHEDULES.items()}


def test_staleness_is_what_the_schedule_promises(runs: dict[str, Run]) -> None:
    assert runs["sync"].staleness == {0: 1.0}
    assert runs["overlap"].staleness == {1: 1.0}
    assert max(runs["async"].staleness) == 1
    for run in runs.values():
        assert sum(run.staleness.values()) == pytest.approx(1.0)


def test_no_schedule_holds_more_groups_than_it_may(runs: dict[str, Run]) -> None:
    step = _RUN.groups * 10
    assert runs["sync"].most_held == step
    assert all(step < runs[name].most_held <= 2 * step for name in ("overlap", "stream", "async"))


def test_what_samples_beside_training_uses_the_servers_more(runs: dict[str, Run]) -> None:
    sync = runs["sync"]
    for name in ("overlap", "stream", "async"):
        assert runs[name].trajectories_per_hour > sync.trajectories_per_hour
        assert runs[name].idle < sync.idle
        assert runs[name].utilisation > sync.utilisation


def test_a_step_of_sync_takes_its_slowest_trajectory_its_update_and_its_sync(
    runs: dict[str, Run],
) -> None:
    sync = runs["sync"]
    assert sync.step_s == pytest.approx(3600 * _RUN.groups * 10 / sync.trajectories_per_hour)
    # Weights travel for `sync_s`, between calls to all servers of a millisecond each.
    trains_s = sync.step_s * (1 - sync.policy_waits)
    assert trains_s == pytest.approx(_RUN.train_s + _RUN.sync_s, abs=0.01)


def test_the_pool_replaces_servers_that_die_and_every_step_has_its_batch(
    runs: dict[str, Run],
) -> None:
    dying = replace(_RUN, death_s=25.0)
    run = run_training(SCHEDULES["stream"](), dying, training_trace(dying, 2), COST)
    assert run.died > run.joined > 0  # a server takes a minute to start
    assert run.sent_again > 0
    assert runs["stream"].died == runs["stream"].sent_again == 0
    assert run.trajectories_per_hour < runs["stream"].trajectories_per_hour


def test_a_server_that_serves_with_older_weights_ends_the_simulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def take_none(
        self: SimulatedServer, request: pb.CommitUpdateRequest, context: None
    ) -> pb.CommitUpdateResponse:
        return pb.CommitUpdateResponse()

    monkeypatch.setattr(SimulatedServer, "CommitUpdate", take_none)
    with pytest.raises(AssertionError, match="older weights"):
        run_training(SCHEDULES["sync"](), _RUN, training_trace(_RUN, 1), COST)


def test_what_a_process_carries_follows_from_its_costs(runs: dict[str, Run]) -> None:
    run = replace(runs["stream"], turns_per_s=100.0, step_s=10.0, decision_s=0.0)
    costs = Costs(worker_ms=0.5, driver_ms=0.04, router_ms=0.01, pool_ms=2.0, server_mib=0.0)
    of = limits_of(run, servers=5, in_flight=0, costs=costs)
    assert of.workers == pytest.approx(0.05)
    assert (of.trajectories, of.pool, of.router) == pytest.approx((0.004, 0.001, 0.001))
    assert of.servers == pytest.approx(
        {"a loop worker": 100, "the driver": 1000, "the router": 5000}
    )
    assert of.next_limit == "the driver"
    assert of.memory_gb == pytest.approx(run.most_held_tokens * 14e-9)
