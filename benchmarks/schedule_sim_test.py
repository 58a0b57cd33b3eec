"""The simulated training is a training: every group once, as its schedule says."""

import pytest
from cluster_sim import Timed, training, training_trace
from routing_replay import COST
from schedule_sim import SCHEDULES, Run, run_training

_SERVERS = 4
_RUN = training(_SERVERS, steps=6, train_s=20.0)


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    trace = training_trace(_RUN, 2)
    return {
        name: run_training(rule(), _RUN, trace, Timed(_SERVERS), cost=COST, servers=_SERVERS)
        for name, rule in SCHEDULES.items()
    }


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
    step_s = 3600 * _RUN.groups * 10 / sync.trajectories_per_hour
    assert step_s * (1 - sync.policy_waits) == pytest.approx(_RUN.train_s + _RUN.sync_s)
