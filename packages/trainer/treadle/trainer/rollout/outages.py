"""Outages: what trajectories need beside the model, and what to do when it is down.

A tool's sandbox, a retrieval service, a judge behind a reward or a simulated user may be down for a
while. Each trajectory that needs it then fails, through no fault of the model, and a step would be
trained on what is left: the trajectories that did without.

Invariant: a source is down when `agent.max_consecutive_failures` trajectories failed because of it,
one after another; a trajectory that it served resets the count. If it had served before, in
this run, the run waits for it. If it never did, a wait would not help, and the run ends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treadle.agent_loop import (
    AgentLoopError,
    InteractionError,
    RewardError,
    ToolError,
    Trajectory,
)
from treadle.trainer.report.failures import causes, of_own_code

__all__ = ["OutageError", "Outages", "OwnCodeError", "check_own_code", "failed_source"]

_REWARD = "the reward"
_INTERACTION = "the simulated user"
_UNNAMED = "a tool"


class OutageError(RuntimeError):
    """Something that the trajectories need is down; the message names it, and how they failed."""


class OwnCodeError(OutageError):
    """Too many trajectories of a step failed because of the user's own code."""


def check_own_code(trajectories: Sequence[Trajectory], *, step: int, limit: float | None) -> None:
    """Ends a run that would train on what a bug in a reward or a loop leaves.

    Raises:
        OwnCodeError: More than the share `limit` of them failed because of such a bug.
    """
    failed = [t for t in trajectories if of_own_code(t.error)]
    if limit is not None and len(failed) > limit * len(trajectories):
        what = "\n  ".join(causes(failed))
        raise OwnCodeError(
            f"step {step}: {len(failed)} of {len(trajectories)} trajectories failed in the reward "
            f"or the loop, more than agent.max_failed_share={limit:g}; a step would be trained on "
            f"what is left. Correct it, and give the same command again:\n  {what}"
        )


def failed_source(error: AgentLoopError | None) -> str | None:
    """Returns what failed, or None: the model, the loop, or a server, which the pool watches."""
    match error:
        case ToolError(tool=str(name)):
            return f"tool {name!r}"
        case ToolError():
            return _UNNAMED
        case InteractionError():
            return _INTERACTION
        case RewardError():
            return _REWARD
    return None


@dataclass(slots=True)
class Outages:
    """Counts the failures of each source, over all steps of a run.

    Attributes:
        failures: Source -> how many trajectories failed because of it since it last served one.
        served: Sources that have served a trajectory.
        given_up: Sources that did not serve again in time, and have not since.
    """

    failures: dict[str, int] = field(default_factory=dict)
    served: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)

    def count(self, trajectory: Trajectory) -> None:
        """Counts a trajectory that has ended."""
        source = failed_source(trajectory.error)
        if source is not None:
            self.failures[source] = self.failures.get(source, 0) + 1
        elif trajectory.error is None:
            for serving in _sources_used(trajectory):
                self.serves(serving)

    def serves(self, source: str) -> None:
        """Resets the count of a source, because it served a trajectory."""
        self.served.add(source)
        self.given_up.discard(source)
        self.failures.pop(source, None)

    def down(self, limit: int | None) -> set[str]:
        """Returns the sources that failed `limit` trajectories one after another."""
        if limit is None:
            return set()
        return {source for source, count in self.failures.items() if count >= limit}

    def describe(self, source: str, causes: Iterable[str]) -> str:
        """Returns what is wrong with a source, for a message."""
        return (
            f"{source} failed {self.failures.get(source, 0)} trajectories one after another "
            f"({'; '.join(causes)})"
        )


def _sources_used(trajectory: Trajectory) -> set[str]:
    """Returns the sources that worked in a trajectory that ended well.

    Only tool results and replies after the row's own messages count. `_UNNAMED` is included with
    every tool result, since an error without a tool's name may come from any tool.
    """
    used, exchange = {_REWARD}, trajectory.exchange
    if exchange.tools_answered:
        used.add(_UNNAMED)
        used |= {f"tool {name!r}" for name in exchange.tools_answered if name}
    if exchange.user_answered:
        used.add(_INTERACTION)
    # The reply that ends a conversation is no message.
    if any(m.name == "interaction/replies" and m.value > 0 for m in trajectory.metrics):
        used.add(_INTERACTION)
    return used
