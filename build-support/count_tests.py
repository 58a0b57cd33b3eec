"""Sums up a CI run: `count_tests.py REPORTS NAME=STATUS...` prints `N passed, N failed`.

First it prints the tests that failed, each with the first line of its message.

REPORTS is a folder of JUnit reports.  NAME is a command that ran and STATUS its exit status.  A
command that failed without a failure in a report (a lint error, a crash, a timeout) counts as one
failure.  Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TESTS = "test"  # begins the names of the commands whose failures the reports explain


def count(reports: Path) -> dict[str, int]:
    """Returns the numbers of tests that passed, failed and were skipped in all reports of a folder.

    Prints the tests that failed.
    """
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for path in sorted(reports.rglob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            outcomes = {child.tag: child for child in case}
            why = outcomes.get("failure", outcomes.get("error"))
            if why is not None:
                totals["failed"] += 1
                (message, *_) = [*why.get("message", "").splitlines(), ""]
                print(f"FAILED {case.get('classname')}.{case.get('name')}: {message}")
            elif "skipped" in outcomes:
                totals["skipped"] += 1
            else:
                totals["passed"] += 1
    return totals


def main(argv: list[str]) -> int:
    """Prints the summary as the last line; returns the exit status."""
    totals = count(Path(argv[0]))
    failed_tests = totals["failed"]
    for command in argv[1:]:
        name, _, status = command.rpartition("=")
        if status == "0":
            print(f"{name}: ok")
        elif name.startswith(TESTS) and failed_tests:
            print(f"{name}: exit status {status}")
        else:
            totals["failed"] += 1
            print(f"{name}: exit status {status}, for which no test is the cause: see above")
    if not totals["passed"] and not totals["failed"]:
        print(f"no test report below {argv[0]}")
        totals["failed"] += 1
    summary = f"{totals['passed']} passed, {totals['failed']} failed"
    print(summary + (f", {totals['skipped']} skipped" if totals["skipped"] else ""))
    return 1 if totals["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
