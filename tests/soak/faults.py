"""The faults of a soak: what is done to which process, when, and how the run may end by it.

Invariant: which faults a round sees, in which order and at which moments is a function of the seed
and the round's number. Every process that a fault stops is continued, if it still exists.
"""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from soak.trainer import UNRESPONSIVE_S, Trainer

Target = Literal[
    "server",
    "all servers",
    "connections",
    "rank",
    "driver",
    "worker",
    "all workers",
    "router",
    "disk",
]
Moment = Literal["at any time", "in an update", "in a checkpoint"]
MOMENTS: Sequence[Moment] = ("at any time", "in an update", "in a checkpoint")
_BRIEFLY, _LONG = (0.3, 3.0), (UNRESPONSIVE_S + 4, UNRESPONSIVE_S + 14)
# A channel has some descriptors. Beside them a rank opens one now and then.
_PUSHING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: For people.
        target: What it hits; "server" is one of them by chance, "connections" are those of one,
            "worker" is one of the loop workers by chance.
        signal: What is sent; SIGSTOP is followed by SIGCONT. Of the disk, SIGSTOP says that it
            stands still, SIGUSR2 that it is slow, and SIGKILL that it is full.
        stopped_s: The least and the most seconds between SIGSTOP and SIGCONT; of a slow disk, of
            its slowness.
        exit: The driver's exit status if the run ends by the fault; None: it must go on.
        says: What the driver then prints.
    """

    name: str
    target: Target
    signal: signal.Signals
    stopped_s: tuple[float, float] = (0.0, 0.0)
    exit: int | None = None
    says: str = ""


KINDS = (
    Kind(name="a server killed", target="server", signal=signal.SIGKILL),
    Kind(name="all servers killed", target="all servers", signal=signal.SIGKILL),
    Kind(
        name="a server stopped briefly",
        target="server",
        signal=signal.SIGSTOP,
        stopped_s=_BRIEFLY,
    ),
    Kind(name="a server stopped for long", target="server", signal=signal.SIGSTOP, stopped_s=_LONG),
    Kind(
        name="all servers stopped for long",
        target="all servers",
        signal=signal.SIGSTOP,
        stopped_s=_LONG,
    ),
    Kind(name="the connections of a server cut", target="connections", signal=signal.SIGUSR1),
    Kind(name="the connections of a server delayed", target="connections", signal=signal.SIGUSR2),
    Kind(
        name="the connections of a server frozen",
        target="connections",
        signal=signal.SIGSTOP,
        stopped_s=(1.0, 12.0),
    ),
    Kind(name="the rank stopped", target="rank", signal=signal.SIGSTOP, stopped_s=(1.0, 12.0)),
    Kind(
        name="the rank killed",
        target="rank",
        signal=signal.SIGKILL,
        exit=1,
        says="policy rank 0 was ended by SIGKILL",
    ),
    Kind(name="the driver stopped", target="driver", signal=signal.SIGSTOP, stopped_s=(1.0, 14.0)),
    Kind(name="the driver killed", target="driver", signal=signal.SIGKILL, exit=-9),
    Kind(
        name="the driver interrupted",
        target="driver",
        signal=signal.SIGINT,
        exit=130,
        says="to resume: run.dir=",
    ),
    Kind(
        name="the driver terminated",
        target="driver",
        signal=signal.SIGTERM,
        exit=143,
        says="to resume: run.dir=",
    ),
)
WORKER_KINDS = (
    Kind(name="a loop worker killed", target="worker", signal=signal.SIGKILL),
    Kind(name="all loop workers killed", target="all workers", signal=signal.SIGKILL),
    Kind(
        name="a loop worker stopped",
        target="worker",
        signal=signal.SIGSTOP,
        stopped_s=(_BRIEFLY[0], _LONG[1]),
    ),
    Kind(name="the router killed", target="router", signal=signal.SIGKILL),
    Kind(
        name="the router stopped",
        target="router",
        signal=signal.SIGSTOP,
        stopped_s=(_BRIEFLY[0], _LONG[1]),
    ),
)
"""Only where the agent loops run on workers."""
DISK_KINDS = (
    Kind(name="the disk stood still", target="disk", signal=signal.SIGSTOP, stopped_s=(1.0, 12.0)),
    Kind(name="the disk slow", target="disk", signal=signal.SIGUSR2, stopped_s=(10.0, 10.0)),
    Kind(
        name="the disk full",
        target="disk",
        signal=signal.SIGKILL,
        exit=2,
        says="cannot write",
    ),
)
"""Only where a file system can be mounted."""
KILLS = tuple(
    replace(kind, exit=None) if kind.target == "rank" else kind  # such a run resumes by itself
    for kind in KINDS + WORKER_KINDS
    if kind.signal is signal.SIGKILL
)
"""Those of a campaign of kills."""
SCHEDULES = ("sync", "overlap", "stream", "async")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of a round.

    Attributes:
        kind: What is done.
        moment: When in the step.
        step: The step in which it is due.
        after: At any time: the share of a step's usual time that passes first.
        stopped_s: Seconds until a stopped process continues, or a slow disk is as before.
        choice: Chooses the server or the worker.
    """

    kind: Kind
    moment: Moment
    step: int
    after: float
    stopped_s: float
    choice: float

    def targets(self, trainer: Trainer) -> list[int]:
        """Returns the pids that it hits now; none if they have not started."""
        servers = [pid for pid, _ in trainer.servers.values()]
        match self.kind.target:
            case "driver":
                return [trainer.process.pid]
            case "rank":
                return [] if trainer.rank is None else [trainer.rank]
            case "all servers":
                return servers
            case "server":
                return servers and [servers[int(self.choice * len(servers))]]
            case "connections":
                proxies = trainer.proxies
                return proxies and [proxies[int(self.choice * len(proxies))]]
            case "all workers":
                return list(trainer.workers.values())
            case "worker":
                workers = list(trainer.workers.values())
                return workers and [workers[int(self.choice * len(workers))]]
            case "router":
                return [] if trainer.router is None else [trainer.router]
            case "disk":
                raise AssertionError("no process is the disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What the seed says of one round.

    Attributes:
        schedule: Of its run.
        workers: Whether its agent loops run on workers.
        faults: In the order of their steps.
    """

    schedule: str
    workers: bool
    faults: Sequence[Fault]


def draw_rounds(
    seed: int, steps: int, each: int, *, kinds: Sequence[Kind] = KINDS + WORKER_KINDS
) -> Iterator[Drawn]:
    """Yields what happens in each round.

    Of four rounds, each has another schedule, and each second one has loop workers; the next four
    have the same schedules, and workers where those had none. All pairs of kind and moment are
    drawn before one comes again, but for those of loop workers: they wait for a round that has
    some.

    Args:
        seed: Of the soak.
        steps: Of a round.
        each: Number of faults of a round.
        kinds: Those that are drawn from.
    """
    rng = random.Random(seed)
    deck: list[tuple[Kind, Moment]] = []
    while True:
        order = rng.sample(SCHEDULES, len(SCHEDULES))
        for place, schedule in enumerate(order * 2):
            workers = place % 2 == place // len(order)
            faults = []
            for step in sorted(rng.randint(1, steps) for _ in range(each)):
                kind, moment = _draw_pair(rng, deck, kinds, workers=workers)
                faults.append(_fault(rng, kind, moment, step, steps))
            yield Drawn(schedule=schedule, workers=workers, faults=faults)


def _draw_pair(
    rng: random.Random, deck: list[tuple[Kind, Moment]], kinds: Sequence[Kind], *, workers: bool
) -> tuple[Kind, Moment]:
    """Takes the last pair of the deck that the round can have; a new deck comes beneath the old."""
    while True:
        for place in reversed(range(len(deck))):
            if workers or deck[place][0] not in WORKER_KINDS:
                return deck.pop(place)
        fresh = list(product(kinds, MOMENTS))
        rng.shuffle(fresh)
        deck[:0] = fresh


def _fault(rng: random.Random, kind: Kind, moment: Moment, step: int, steps: int) -> Fault:
    # A checkpoint follows each second step.
    step += moment == "in a checkpoint" and step % 2
    return Fault(
        kind=kind,
        moment=moment,
        step=min(step, steps),
        after=rng.random(),
        stopped_s=round(rng.uniform(*kind.stopped_s), 2),
        choice=rng.random(),
    )


class MomentWatch:
    """Tells whether a run is pushing weights or writing a checkpoint, from outside."""

    def __init__(self) -> None:
        self._rank: int | None = None
        self._step = -1
        self._idle = 0

    def is_now(self, moment: Moment, trainer: Trainer, step: int) -> bool:
        """Returns whether `moment` is now; call it often.

        Args:
            moment: "in an update" or "in a checkpoint".
            trainer: Of the run.
            step: The last step that has ended.
        """
        if moment == "in a checkpoint":
            return any((trainer.run / "checkpoints").glob("*.partial"))
        rank = trainer.rank
        if rank is None:
            return False
        open_now = num_descriptors(rank)
        if (rank, step) != (self._rank, self._step):  # a step begins with a rollout
            self._rank, self._step, self._idle = rank, step, open_now
        self._idle = min(self._idle, open_now)
        return open_now >= self._idle + _PUSHING


def num_descriptors(pid: int) -> int:
    """Returns the number of descriptors that a process has open; 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


class Stopped:
    """The processes that are stopped now, and when each is continued."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: list[tuple[float, int]] = []  # (time, pidfd)

    def send(self, pids: Sequence[int], fault: Fault) -> list[int]:
        """Sends the fault's signal; returns the pids that got it."""
        hit = []
        for pid in pids:
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, fault.kind.signal)
                hit.append(pid)
            if fault.kind.signal is signal.SIGSTOP:
                self._until.append((self._clock() + fault.stopped_s, pidfd))
            else:
                os.close(pidfd)
        return hit

    def __len__(self) -> int:
        """Number of processes that are still to be continued."""
        return len(self._until)

    def continue_due(self, *, everything: bool = False) -> None:
        """Continues the processes whose time has come, or all."""
        for entry in list(self._until):
            until, pidfd = entry
            if everything or self._clock() >= until:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGCONT)
                os.close(pidfd)
                self._until.remove(entry)


def partial_files(run: Path) -> list[str]:
    """Returns what a run that has ended must not have left in its directory."""
    return [
        str(path.relative_to(run))
        for pattern in (
            "*.partial",
            "checkpoints/*.partial",
            "server_token",
        )
        for path in run.glob(pattern)
    ]
