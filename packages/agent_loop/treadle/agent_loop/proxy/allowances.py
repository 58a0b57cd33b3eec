"""Parts of a request that are not honoured: constrained sampling, and keys that nothing reads.

Invariant: everything ignored here is counted, and the trajectory reports the counts. Agent
frameworks request constraints by default (`strict` schemas, `tool_choice="required"`), and send
back keys of other providers' messages. The trainer would treat constrained tokens as the policy's
own, so a constraint is refused, or not enforced, or enforced in a turn that is not trained on.
"""

import enum
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from treadle.agent_loop.proxy.errors import unsupported
from treadle.agent_loop.trajectory import Finding
from treadle.tracing import Metric, Reduce


class AgentConstraints(enum.StrEnum):
    """What to do with an agent's request to constrain the sampling."""

    REFUSE = "refuse"
    """Refuse it, by its name."""
    IGNORE = "ignore"
    """Sample without the constraint, and count it. The agent sees what the policy said, as with a
    provider that does not guarantee the constraint. Hosted tools are left out, and counted too."""
    ENFORCE = "enforce"
    """Sample response formats, and calls in a format whose arguments are JSON, under their
    constraint; every server must be able to (`constrained_sampling`). The others as IGNORE. A turn
    that is sampled so is context only: nothing of it is trained on."""

    @property
    def required_capabilities(self) -> frozenset[str]:
        """The capabilities that servers must have, named as in the contract."""
        return frozenset({"constrained_sampling"} if self is AgentConstraints.ENFORCE else ())


CONSTRAINTS = ("hosted_tools", "parallel_tool_calls", "response_format", "strict", "tool_choice")
"""The wishes that are counted and not fulfilled: parameters that constrain the sampling,
and tools that a provider would run."""


@dataclass(slots=True)
class CallRules:
    """The rules of a request for the model's calls, where they are enforced.

    Attributes:
        strict: Names of the tools whose arguments follow their schemas.
        required: Whether the turn is a call.
        only: The tool that is called, if the request names it.
        single: Whether there is at most one call.
    """

    strict: set[str] = field(default_factory=set)
    required: bool = False
    only: str | None = None
    single: bool = False

    def __bool__(self) -> bool:
        return bool(self.strict) or self.required or self.single


class Allowances:
    """Counts of what was let pass, in one request or in all of a session.

    Args:
        constraints: The treatment of requests to constrain the sampling.
        calls_enforced: Whether constraints of calls are enforced, and not let pass.

    Attributes:
        calls: Filled by the readers of requests; empty if calls are not enforced.
    """

    def __init__(
        self,
        constraints: AgentConstraints = AgentConstraints.REFUSE,
        *,
        calls_enforced: bool = False,
    ) -> None:
        self.constraints = constraints
        self.calls_enforced = calls_enforced
        self.calls = CallRules()
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def constraint(self, name: str, param: str, problem: str) -> None:
        """Lets a constraint pass, one of `CONSTRAINTS`.

        Args:
            name: Under which it is counted.
            param: Its place in the request.
            problem: The problem of the request, and its fix.

        Raises:
            ApiError: Constraints are refused.
        """
        if self.constraints is AgentConstraints.REFUSE:
            raise unsupported(
                param,
                f"{problem}, or run the loop with AgentConstraints.IGNORE (it is not enforced)",
            )
        self._count(name, param)

    def unread_key(self, place: str) -> None:
        """Lets a key of a request or of a message pass that nothing reads."""
        self._count("ignored_keys", place)

    def for_request(self) -> "Allowances":
        """Returns those of the session's next request."""
        return Allowances(self.constraints, calls_enforced=self.calls_enforced)

    def add(self, request: "Allowances") -> None:
        """Adds what a request was allowed."""
        self._counts.update(request._counts)
        self._examples = {**request._examples, **self._examples}

    def metrics(self) -> Iterator[Metric]:
        """Yields the numbers, of all kinds."""
        for name in CONSTRAINTS:
            yield Metric(f"proxy/unenforced_{name}", self._counts[name], Reduce.SUM)
        yield Metric("proxy/ignored_keys", self._counts["ignored_keys"], Reduce.SUM)

    def findings(self) -> Iterator[Finding]:
        """Yields what was let pass, a text per kind with the first place."""
        for name, example in sorted(self._examples.items()):
            number = self._counts[name]
            if name == "ignored_keys":
                text = f"{number} keys were ignored; the first was {example}"
                yield Finding(kind="ignored_keys", text=text)
            else:
                text = f"{name} was asked for {number} times and not enforced; first as {example}"
                yield Finding(kind="unenforced_constraint", text=text)

    def _count(self, name: str, place: str) -> None:
        self._counts[name] += 1
        self._examples.setdefault(name, place)
