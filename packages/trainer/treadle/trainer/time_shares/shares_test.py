"""The shares of a step add up, whatever happened to the servers."""

import asyncio
from collections.abc import Mapping

import pytest

from treadle.policy.config.choices import CAUSES
from treadle.policy.weight_sync.errors import Outcome, WeightSyncError
from treadle.rollout.v1 import server_service_pb2 as pb
from treadle.trainer.time_shares.ranks import rank_shares, ranks_busy
from treadle.trainer.time_shares.servers import ServerShares


class Told:
    """A server that tells what a test gives it."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name = name
        self.address = address or name
        self.seconds: dict[str, float] = {}
        self.answers = True
        self.turns = 0
        self.is_older = False

    async def info(self) -> pb.GetServerInfoResponse:
        for _ in range(self.turns):  # of the event loop, until it answers
            await asyncio.sleep(0)
        if not self.answers:
            raise WeightSyncError("gone", Outcome.RESUME)
        if self.is_older:
            return pb.GetServerInfoResponse()
        info = pb.GetServerInfoResponse(time_use={})
        for cause, seconds in self.seconds.items():
            getattr(info.time_use, cause).FromNanoseconds(round(seconds * 1e9))
        return info


class Run:
    """Servers, a clock, and what is known of their sessions."""

    def __init__(self, *servers: Told) -> None:
        self.servers = list(servers)
        self.now = 0.0
        self.occupied: Mapping[str, float] = {}
        self.dead: set[str] = set()
        self.shares = ServerShares(
            lambda: self.servers, lambda: self.dead, self._occupied_s, lambda: self.now
        )
        assert asyncio.run(self.shares.take({})) == {}

    async def _occupied_s(self) -> Mapping[str, float]:
        return self.occupied

    def step(self, passed_s: float, **phases: float) -> dict[str, float]:
        """Returns the shares of a step that are not 0."""
        self.now += passed_s
        told = {f"time/{phase}_s": seconds for phase, seconds in phases.items()}
        found = asyncio.run(self.shares.take(told))
        busy = (found.pop("servers/busy_min"), found.pop("servers/busy_max"))
        assert busy == (min(self.shares.busy.values()), max(self.shares.busy.values()))
        assert sum(found.values()) == pytest.approx(1.0)
        assert all(share >= 0 for share in found.values())
        return {name.rpartition("/")[2]: share for name, share in found.items() if share}


def test_shares_are_of_the_step_and_means_over_the_servers() -> None:
    first, second = Told("a"), Told("b")
    first.seconds = second.seconds = {"starting": 3.0, "waiting": 5.0}
    run = Run(first, second)
    first.seconds = {"starting": 3.0, "waiting": 7.0, "prefill": 2.0, "decode": 4.0}
    second.seconds = {"starting": 3.0, "waiting": 5.0, "weights": 6.0, "memory": 2.0}
    assert run.step(8.0) == pytest.approx(
        {"prefill": 0.125, "decode": 0.25, "prompts": 0.125, "weights": 0.375, "memory": 0.125}
    )
    assert run.shares.busy == pytest.approx({"a": 0.75, "b": 0.0})


def test_only_the_first_answer_is_waited_for_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("treadle.trainer.time_shares.servers._ANSWER_S", 0.0)
    server = Told("a")
    server.turns = 10
    run = Run(server)
    server.turns, server.seconds = 0, {"decode": 4.0}
    assert run.step(4.0) == {"decode": 1.0}
    server.turns, server.seconds = 10, {"decode": 8.0}
    assert run.step(4.0) == {"down": 1.0}


def test_a_server_without_a_session_waits_for_training_and_else_for_prompts() -> None:
    server = Told("a")
    run = Run(server)
    server.seconds = {"decode": 2.0, "waiting": 8.0}
    shares = run.step(10.0, train=3.0, critic=1.0, values=0.5, kl=0.5, save=2.0, rollout=3.0)
    assert shares == pytest.approx({"decode": 0.2, "training": 0.5, "prompts": 0.3})
    # Beside training it may have sampled meanwhile.
    server.seconds = {"decode": 11.0, "waiting": 9.0}
    assert run.step(10.0, train=9.0) == pytest.approx({"decode": 0.9, "training": 0.1})


def test_waiting_is_for_tools_while_sessions_are_open() -> None:
    server = Told("a", "host:1")
    run = Run(server)
    server.seconds = {"waiting": 6.0, "prefill": 1.0, "decode": 3.0}
    run.occupied = {"host:1": 9.0}
    assert run.step(10.0) == pytest.approx(
        {"tools": 0.5, "prompts": 0.1, "prefill": 0.1, "decode": 0.3}
    )
    # Sessions were open during an update too, which explains itself.
    server.seconds = {"waiting": 8.0, "prefill": 1.0, "decode": 3.0, "weights": 8.0}
    run.occupied = {"host:1": 19.0}
    assert run.step(10.0) == pytest.approx({"tools": 0.2, "weights": 0.8})
    # A router that was started again counts from its start.
    server.seconds = {"waiting": 17.0, "prefill": 1.0, "decode": 4.0, "weights": 8.0}
    run.occupied = {"host:1": 3.0}
    assert run.step(10.0) == pytest.approx({"tools": 0.2, "prompts": 0.7, "decode": 0.1})


def test_a_server_that_dies_and_its_successor_were_down_meanwhile() -> None:
    first, other = Told("a"), Told("b")
    run = Run(first, other)
    run.servers, run.dead = [other], {"a"}
    other.seconds = {"decode": 4.0}
    assert run.step(4.0) == pytest.approx({"down": 0.5, "decode": 0.5})
    assert run.shares.busy == {"a": 0.0, "b": 1.0}
    again = Told("a")
    again.seconds = {"starting": 1.0, "waiting": 1.0}
    run.servers, run.dead, other.seconds = [again, other], set(), {"decode": 8.0}
    assert run.step(4.0) == pytest.approx({"down": 0.375, "prompts": 0.125, "decode": 0.5})


def test_a_start_that_takes_several_steps_is_down_in_each_of_them() -> None:
    first, other = Told("a"), Told("b")
    run = Run(first, other)
    run.servers, run.dead = [other], {"a"}
    for step in (1, 2):
        other.seconds = {"decode": 4.0 * step}
        assert run.step(4.0) == pytest.approx({"down": 0.5, "decode": 0.5})
    again = Told("a")
    again.seconds = {"starting": 9.0, "waiting": 1.0, "weights": 1.0}
    run.servers, run.dead, other.seconds = [again, other], set(), {"decode": 12.0}
    assert run.step(4.0) == pytest.approx(
        {"down": 0.25, "prompts": 0.125, "weights": 0.125, "decode": 0.5}
    )
    # One of someone else that only stood still has told more than of this step.
    run.servers, run.dead, other.seconds = [other], {"a"}, {"decode": 16.0}
    assert run.step(4.0) == pytest.approx({"down": 0.5, "decode": 0.5})
    stood = Told("a")
    stood.seconds = {"starting": 1.0, "waiting": 90.0}
    run.servers, run.dead, other.seconds = [stood, other], set(), {"decode": 20.0}
    assert run.step(4.0) == {"decode": 1.0}


def test_a_server_that_was_drained_is_not_down() -> None:
    leaves, other = Told("a"), Told("b")
    run = Run(leaves, other)
    run.servers, other.seconds = [other], {"decode": 4.0}
    assert run.step(4.0) == {"decode": 1.0}


def test_a_server_without_an_answer_is_down_and_one_that_is_older_than_the_run_is_not_guessed() -> (
    None
):
    server, stranger = Told("a"), Told("b")
    run = Run(server)
    server.seconds = {"decode": 500.0}
    run.step(500.0)
    server.answers = False
    stranger.seconds = {"waiting": 1000.0}
    run.servers.append(stranger)
    assert run.step(2.0) == {"down": 1.0}
    server.answers = True
    server.seconds = {"decode": 501.0, "weights": 3.0}
    stranger.seconds = {"waiting": 1002.0}
    assert run.step(2.0) == pytest.approx({"decode": 0.125, "weights": 0.375, "prompts": 0.5})


def test_a_server_that_does_not_know_the_field_counts_in_no_share() -> None:
    server, older = Told("a"), Told("b")
    older.is_older = True
    run = Run(server, older)
    server.seconds = {"decode": 4.0}
    assert run.step(4.0) == {"decode": 1.0}
    run.servers, server.seconds = [server], {"decode": 8.0}
    assert run.step(4.0) == {"decode": 1.0}
    run.servers = [older]
    run.now += 1.0
    assert asyncio.run(run.shares.take({})) == {}
    assert run.shares.busy == {}


def test_clocks_that_differ_leave_the_sum_at_one() -> None:
    server = Told("a")
    run = Run(server)
    server.seconds = {"decode": 3.0, "waiting": 1.0}
    assert run.step(3.9) == pytest.approx({"decode": 0.75, "prompts": 0.25})


def test_a_rank_waits_for_what_the_driver_did_meanwhile() -> None:
    report = {**dict.fromkeys(CAUSES, 0.0), "waiting": 6.0, "train": 3.0, "receive": 1.0}
    other = {**dict.fromkeys(CAUSES, 0.0), "waiting": 1.0, "train": 9.0}
    phases = {"time/rollout_s": 4.0, "time/validate_s": 1.0, "time/sync_s": 2.0}
    shares = rank_shares([report, other], phases)
    assert ranks_busy([report, other]) == pytest.approx({"policy-0": 0.4, "policy-1": 0.9})
    assert shares.pop("policy/busy_min") == pytest.approx(0.4)
    assert shares.pop("policy/busy_max") == pytest.approx(0.9)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert {name: share for name, share in shares.items() if share} == pytest.approx(
        {
            "policy/time_share/train": 0.6,
            "policy/time_share/receive": 0.05,
            "policy/time_share/rollout": 0.25,
            "policy/time_share/validation": 0.05,
            "policy/time_share/driver": 0.05,
        }
    )
