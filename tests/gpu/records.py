"""The results beside a page, a line of JSON each, from which a later call goes on.

Invariant: results of another machine, other packages or another commit are not taken over. What
was skipped is decided anew: an engine may have been named since.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gpu.check import Check
from gpu.runner import Outcome, Result

Machine = Sequence[tuple[str, str]]


def write(path: Path, machine: Machine, results: Sequence[Result]) -> None:
    """Writes the machine and all results, in place of what was there."""
    lines = [json.dumps({"machine": [list(row) for row in machine]})]
    for result in results:
        fields = {**asdict(result), "check": result.check.name, "outcome": result.outcome.name}
        lines.append(json.dumps(fields))
    building = path.with_name(f"{path.name}.writing")
    building.write_text("\n".join(lines) + "\n")
    building.replace(path)


def read(path: Path, machine: Machine, checks: Sequence[Check]) -> list[Result]:
    """Returns the results of checks that ended on this machine, in the order of the file."""
    if not path.is_file():
        return []
    first, *lines = path.read_text().splitlines()
    if json.loads(first)["machine"] != [list(row) for row in machine]:
        return []
    by_name = {check.name: check for check in checks}
    found = []
    for line in lines:
        fields = json.loads(line)
        fields["outcome"] = Outcome[fields["outcome"]]
        check = by_name.get(fields["check"])
        if check is not None and fields["outcome"] is not Outcome.SKIPPED:
            found.append(Result(**fields | {"check": check}))
    return found
