"""Formats the results of the checks, as a table for people and as JSON for programs."""

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from treadle.conformance.run import CheckResult, ContractOutcome
from treadle.rollout.v1 import server_service_pb2 as srv

_WIDTH = 118
_NAME = 72
_SEEN_CHARACTERS = 600
_MARKS = {
    ContractOutcome.HOLDS: "holds",
    ContractOutcome.FAILS: "DOES NOT",
    ContractOutcome.SKIPPED: "skipped",
}


def heading(address: str, server: srv.GetServerInfoResponse) -> str:
    """Returns one line that describes the server."""
    model = server.model
    return (
        f"{address}: {server.engine} {server.engine_version}, server {server.server_version}, "
        f"{model.architecture}, {model.vocab_size} ids, context {model.context_length}, "
        f"weight version {server.weight_version}\n"
    )


def table(checks: Sequence[CheckResult]) -> str:
    """Returns one line per check, grouped by part, with details below it, and the totals."""
    return "\n".join(_lines(checks)) + "\n"


def _lines(checks: Sequence[CheckResult]) -> Iterator[str]:
    part = None
    for check in checks:
        if check.part != part:
            part = check.part
            yield f"\n{part}"
        # A name that is too long for its column is not cut; it moves the outcome to the right.
        yield f"  {check.name:<{_NAME}}  {_MARKS[check.outcome]}"
        if check.seen:
            seen = textwrap.shorten(check.seen, _SEEN_CHARACTERS, placeholder=" ...")
            yield textwrap.indent(textwrap.fill(seen, _WIDTH - 6), "      ")
    counts = Counter(check.outcome for check in checks)
    yield (
        f"\n{counts[ContractOutcome.HOLDS]} hold, {counts[ContractOutcome.FAILS]} do not, "
        f"{counts[ContractOutcome.SKIPPED]} skipped"
    )


def about(address: str, server: srv.GetServerInfoResponse) -> Mapping[str, str]:
    """Returns what the JSON has of a rollout server."""
    return {
        "address": address,
        "engine": server.engine,
        "engine_version": server.engine_version,
        "server_version": server.server_version,
    }


def as_json(server: Mapping[str, str], checks: Sequence[CheckResult]) -> str:
    """Returns a description of the server, and what the table has, as one JSON object."""
    counts = Counter(check.outcome for check in checks)
    found = {
        **server,
        "holds": counts[ContractOutcome.HOLDS],
        "does_not": counts[ContractOutcome.FAILS],
        "skipped": counts[ContractOutcome.SKIPPED],
        "checks": [
            {"part": c.part, "check": c.name, "outcome": c.outcome.value, "seen": c.seen}
            for c in checks
        ],
    }
    return json.dumps(found, indent=2) + "\n"
