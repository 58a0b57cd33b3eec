"""What a request asks for and does not get: constrained sampling, and keys that nothing reads.

Invariant: whatever is let pass here is counted, and the trajectory says so. Agent frameworks ask
for constraints by default (`strict` schemas, `tool_choice="required"`), and send back keys that
other providers gave their messages. The trainer would treat constrained tokens as the policy's own,
so a constraint is either refused or not enforced.
"""

import enum
from collections import Counter
from collections.abc import Iterator

from treadle.agent_loop.proxy.errors import unsupported
from treadle.agent_loop.trajectory import Finding
from treadle.tracing import Metric, Reduce


class AgentConstraints(enum.StrEnum):
    """What to do with an agent's request to constrain the sampling."""

    REFUSE = "refuse"
    """Refuse it, by its name."""
    IGNORE = "ignore"
    """Sample without the constraint, and count it. The agent sees what the policy said, as with a
    provider that does not guarantee the constraint."""
    ENFORCE = "enforce"
    """Sample response formats under their constraint, if every server can (`constrained_sampling`);
    the others as IGNORE. A turn that is sampled so is context only: nothing of it is trained on."""


CONSTRAINTS = ("parallel_tool_calls", "response_format", "strict", "tool_choice")
"""The parameters of requests that constrain the sampling, as they are counted."""


class Allowances:
    """What was let pass, in one request or in all of a session.

    Args:
        constraints: What to do with a request to constrain the sampling.
    """

    def __init__(self, constraints: AgentConstraints = AgentConstraints.REFUSE) -> None:
        self.constraints = constraints
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    def constraint(self, name: str, param: str, problem: str) -> None:
        """Lets a constraint pass, one of `CONSTRAINTS`.

        Args:
            name: Under which it is counted.
            param: Its place in the request.
            problem: What is wrong with it, and what to do.

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
