"""The time shares of the servers, `servers/time_share/<cause>`, from the servers' own reports.

A server reports the seconds of each cause since it started (`GetServerInfo`). The driver, or the
router of its loop workers, measures how long the server was occupied: had open sessions. The time
in which a server waited for prompts is divided into three shares. `tools` is the part in which it
was occupied, when all of its trajectories were in tools: the occupied time less prefill and decode.
During an update with open sessions these may or may not be in tools, so that time counts as the
update, and `tools` is capped at the measured wait. The rest is `training`, up to the time for which
the driver's step trained, and `prompts` beyond that: no prompt was there. The report does not date
a wait within the step, so if trajectories are sampled beside training, `training` is an upper
bound.

A dead server is `down` in every step until it serves again, however many steps its start takes; a
drained server has left the run and counts in no share.

Invariant: the shares of one server add up to 1. Time that its report does not cover is `down`: it
was dead, was starting, or gave no answer. If clocks differ a little and its seconds exceed the time
that passed, they are scaled down to it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from treadle.agent_loop.aio import concurrently
from treadle.policy.weight_sync.errors import WeightSyncError
from treadle.rollout.v1 import server_service_pb2 as pb
from treadle.trainer.time_shares.busy import busy_range
from treadle.trainer.time_shares.server_causes import SERVER_CAUSES

__all__ = ["AskedServer", "ServerShares"]

_ANSWER_S: Final = 2.0
"""A server that stands still must not hold up the step for longer."""
_TRAINING: Final = tuple(f"time/{phase}_s" for phase in ("kl", "values", "critic", "train"))
"""The driver's phases in which the policy ranks train, and compute what the update needs."""


class AskedServer(Protocol):
    """The part of `WeightSyncClient` that is needed here."""

    name: str
    address: str

    async def info(self) -> pb.GetServerInfoResponse:
        """Returns what the server is and holds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The counts of a server at one moment.

    Attributes:
        seconds: Seconds of each cause of the contract since it started.
        occupied_s: For how long it has had open sessions.
    """

    seconds: Mapping[str, float]
    occupied_s: float


_UNTOLD = _Answer(seconds={}, occupied_s=0.0)
"""Answer of a server that is older than the field, or of another make: it counts in no share."""


class ServerShares:
    """Measures from one call of `take` to the next.

    Args:
        servers: Returns the servers of the rotation. A restarted one has a new client.
        dead: Returns the names of those that are dead, or start again.
        occupied_s: Returns by address for how long servers have had open sessions.
        now: Returns the time in seconds.

    Attributes:
        busy: By name, the share of the time between the last two calls in which a server read
            prompts or sampled.
    """

    def __init__(
        self,
        servers: Callable[[], Sequence[AskedServer]],
        dead: Callable[[], Collection[str]],
        occupied_s: Callable[[], Awaitable[Mapping[str, float]]],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._servers = servers
        self._dead = dead
        self._occupied_s = occupied_s
        self._now = now
        self._at = now()
        self._known: dict[AskedServer, _Answer | None] | None = None
        self._were_dead: Collection[str] = ()
        self.busy: Mapping[str, float] = {}

    async def take(self, phases: Mapping[str, float]) -> dict[str, float]:
        """Returns the shares since the last call; nothing the first time.

        Args:
            phases: Seconds of the driver's phases since then, as `time/train_s`.
        """
        is_first, before, began = self._known is None, self._known or {}, self._at
        were_dead, self._were_dead = self._were_dead, frozenset(self._dead())
        servers = self._servers()
        occupied_s = await self._occupied_s()
        # No step waits for the first answers, without which the next shares would be unknown.
        within_s = None if is_first else _ANSWER_S
        answers = await concurrently(
            self._ask(server, occupied_s.get(server.address, 0.0), within_s) for server in servers
        )
        self._at = self._now()
        passed_s = self._at - began
        told = dict(zip(servers, answers, strict=True))
        # Of one without an answer the next share is of a longer time.
        self._known = {server: answer or before.get(server) for server, answer in told.items()}
        training_s = sum(phases.get(phase, 0.0) for phase in _TRAINING)
        shares: dict[str, dict[str, float]] = {name: {"down": 1.0} for name in self._were_dead}
        for server, answer in told.items():
            known = before.get(server)
            if known is None and answer is not None:
                known = _at_begin(answer, passed_s, was_dead=server.name in were_dead)
            if known is not None and answer is not _UNTOLD:
                shares[server.name] = _shares(known, answer, passed_s, training_s)
        if is_first or not shares:
            self.busy = {}
            return {}
        self.busy = {
            name: each.get("prefill", 0.0) + each.get("decode", 0.0)
            for name, each in shares.items()
        }
        means = {
            f"servers/time_share/{cause}": sum(each.get(cause, 0.0) for each in shares.values())
            / len(shares)
            for cause in SERVER_CAUSES
        }
        return means | busy_range("servers", self.busy)

    async def _ask(
        self, server: AskedServer, occupied_s: float, within_s: float | None
    ) -> _Answer | None:
        """Returns the counts of a server; None if it gives no answer.

        Args:
            occupied_s: For how long it has had open sessions.
            within_s: Time for an answer; None: that of the call itself.
        """
        try:
            async with asyncio.timeout(within_s):
                info = await server.info()
        except (WeightSyncError, TimeoutError):
            return None
        if not info.HasField("time_use"):
            return _UNTOLD
        use = info.time_use
        return _Answer(
            seconds={
                field.name: getattr(use, field.name).ToNanoseconds() / 1e9
                for field in use.DESCRIPTOR.fields
            },
            occupied_s=occupied_s,
        )


def _at_begin(answer: _Answer, passed_s: float, *, was_dead: bool) -> _Answer | None:
    """Returns the counts of a new server at the begin of the step; None if they are unknown.

    The start of a server that was dead then may have begun before the step; all else came after.
    """
    seconds = {"starting": answer.seconds["starting"]} if was_dead and answer.seconds else {}
    if sum(answer.seconds.values()) - sum(seconds.values()) > passed_s:
        return None
    return _Answer(seconds=seconds, occupied_s=answer.occupied_s)


def _shares(
    before: _Answer, after: _Answer | None, passed_s: float, training_s: float
) -> dict[str, float]:
    """Returns the shares of one server."""
    if after is None or passed_s <= 0:
        return {"down": 1.0}
    spent = {cause: s - before.seconds.get(cause, 0.0) for cause, s in after.seconds.items()}
    occupied_s = after.occupied_s - before.occupied_s
    if occupied_s < 0.0:  # the router was started again meanwhile
        occupied_s = after.occupied_s
    waiting_s = spent.pop("waiting")
    without_sequence_s = occupied_s - spent["prefill"] - spent["decode"]
    tools_s = min(waiting_s, max(0.0, without_sequence_s))
    without_session_s = waiting_s - tools_s
    spent |= {
        "tools": tools_s,
        "training": min(without_session_s, training_s),
        "prompts": max(0.0, without_session_s - training_s),
    }
    spent["down"] = spent.pop("starting") + spent.pop("failed")
    told_s = sum(spent.values())
    spent["down"] += max(0.0, passed_s - told_s)
    whole_s = max(told_s, passed_s)
    return {cause: seconds / whole_s for cause, seconds in spent.items()}
