"""Sums up a CI run: `count_tests.py REPORTS FIRST_TRIES NAME=STATUS...`.

The last line is `N passed, N failed`.  REPORTS is a folder of JUnit reports.  NAME is a command
that ran and STATUS its exit status, or two, `1,0`, if it ran a second time for what had failed;
FIRST_TRIES has the reports of the first.

First it prints the tests that failed, each with the first line of its message: FAILED, or FLAKY if
the second try passed.  A flaky test counts as passed, since one among thousands says little about a
change; it is a defect to mend all the same, and more than MAX_FLAKY of them are one failure.

A command that failed without a failure in a report (a lint error, a crash, a timeout) counts as one
failure.  Standard library only, any Python from 3.8.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

TESTS = "test"  # begins the names of the commands whose failures the reports explain
MAX_FLAKY = 3


def cases(reports: Path) -> Iterator[tuple[str, dict[str, ElementTree.Element]]]:
    """Yields each test of all reports below a folder: its name, and its outcomes by tag.

    A test that passed has none.
    """
    for path in sorted(reports.rglob("*.xml")):
        for case in ElementTree.parse(path).iter("testcase"):
            yield (
                f"{case.get('classname')}.{case.get('name')}",
                {child.tag: child for child in case},
            )


def failures(reports: Path) -> list[tuple[str, str]]:
    """Returns each test that failed, with the first line of its message."""
    found = []
    for name, outcomes in cases(reports):
        why = outcomes.get("failure", outcomes.get("error"))
        if why is not None:
            found.append((name, (why.get("message", "").splitlines() or [""])[0]))
    return found


def main(argv: list[str]) -> int:
    """Prints the summary as the last line; returns the exit status."""
    reports, first_tries = map(Path, argv[:2])
    failed_tests = failures(reports)
    for name, message in failed_tests:
        print(f"FAILED {name}: {message}")
    names = {name for name, _ in failed_tests}
    flaky_tests = [(name, why) for name, why in failures(first_tries) if name not in names]
    for name, message in flaky_tests:
        print(f"FLAKY {name}: {message}")

    total = skipped = 0
    for _, outcomes in cases(reports):
        total += 1
        skipped += "skipped" in outcomes
    failed, passed = len(failed_tests), total - skipped - len(failed_tests)
    second_tries = 0
    for command in argv[2:]:
        name, _, statuses = command.rpartition("=")
        *first, last = statuses.split(",")
        if last == "0" and not first:
            print(f"{name}: ok")
        elif last == "0":
            second_tries += 1
            print(f"{name}: ok at the second try, exit status {first[0]} at the first")
        elif name.startswith(TESTS) and failed_tests:
            print(f"{name}: exit status {last}")
        else:
            failed += 1
            print(f"{name}: exit status {last}, for which no test is the cause: see above")
    # A try that crashed or timed out may have no report.
    flaky = max(len(flaky_tests), second_tries)
    if flaky > MAX_FLAKY:
        failed += 1
        print(f"{flaky} tests failed and passed when run again: more than {MAX_FLAKY}")
    if not total:
        failed += 1
        print(f"no test report below {reports}")
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
