"""The run: every check once, through pytest, and what became of each.

Invariant: a check that could not run is skipped with its reason, never counted as one that
holds; a check whose own code fails to load is an error of the kit and ends the run. Nothing is
asked of a server that is gone, or that let some checks fail by waiting.
"""

import asyncio
import enum
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from treadle.conformance.contracts import CONTRACTS
from treadle.conformance.contracts.remote_contract import Target
from treadle.conformance.settings import Settings, lost

_PARTS = (
    *("handshake", "generation", "pauses", "updates", "calls_again", "in_place", "files"),
    *("delta", "shared_memory", "collective", "group", "engine", "model", "left_open"),
)
"""In this order: the last one looks at what the others left behind."""
_OF_CONTRACT = ("group", "engine", "model")
"""The parts that are classes of contract_checks.py; each of the others is a file."""
_WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_WAITED_S = 60.0
_MOST_WAITED = 3
_NAMES = {
    "model": "its tokens and log-probs are those of transformers",
    "group": "what senders broadcast to a group is what an update brings",
}
"""What a part says that does not load where something is lacking."""


class Outcome(enum.Enum):
    """What became of a check."""

    HOLDS = "holds"
    FAILS = "does not"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check, as it went.

    Attributes:
        part: What it belongs to, as "updates".
        name: What the contract says, as "a corrupt chunk is refused".
        seen: Why it was skipped, what was seen instead, or a figure.
    """

    part: str
    name: str
    outcome: Outcome
    seen: str


class Plugin:
    """Gives the checks their settings, and collects what becomes of them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waited = 0
        self._over = ""
        self.checks: dict[str, Check] = {}
        self.broken: list[str] = []

    @pytest.fixture(scope="session")
    def settings(self) -> Settings:
        """What the kit was told."""
        return self._settings

    @pytest.fixture(scope="session")
    def target(self) -> Target:
        """The server."""
        return self._settings.target

    def pytest_configure(self, config: pytest.Config) -> None:
        """Once pytest can rewrite assertions, and before the checks import the contracts."""
        pytest.register_assert_rewrite(*CONTRACTS)
        # Nobody is shown the source, and Python 3.11 may fail to parse it as deep as this.
        config.option.tbstyle = "native"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of checks that does not load is a fault of the kit."""
        if report.failed:
            self.broken.append(str(report.longrepr))

    def pytest_runtest_setup(self) -> None:
        """Skips what would only wait."""
        if self._over:
            pytest.skip(self._over)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One for each phase of a check; the first that is not plain decides."""
        known = self.checks.get(report.nodeid)
        if known is not None and known.outcome is not Outcome.HOLDS:
            return
        if report.passed and report.when != "call":
            return
        self.checks[report.nodeid] = _check(report)
        if report.when == "call" or not report.passed:
            sys.stderr.write("." if report.passed else "s" if report.skipped else "F")
            sys.stderr.flush()
        if report.failed:
            self._over = self._over or self._why_over(report)

    def _why_over(self, report: pytest.TestReport) -> str:
        """Why the rest need not be asked after a check that failed; empty: it is asked."""
        name = _check(report).name
        if why := asyncio.run(lost(self._settings)):
            return f"since {name!r}, {why}"
        self._waited += report.duration > _WAITED_S
        if self._waited < _MOST_WAITED:
            return ""
        return (
            f"{_MOST_WAITED} checks failed after {_WAITED_S:.0f} s each, {name!r} was the last: "
            "mend them first, or name others by --only"
        )


def run(settings: Settings, lacking: Mapping[str, str], *, only: str | None = None) -> list[Check]:
    """Runs the checks; takes minutes.

    Args:
        settings: The server, and what is known of it.
        lacking: Parts that cannot run, and why; their checks import torch.
        only: Checks with these words, as pytest's ``-k`` understands them.

    Raises:
        RuntimeError: A file of checks does not load, or not all of them were run.
    """
    plugin = Plugin(settings)
    folder = Path(__file__).parent / "checks"
    nodes = [str(folder / _node(part)) for part in _PARTS if part not in lacking]
    arguments = [
        *nodes,
        *("-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib"),
        # The checks are no part of whatever project the kit is started in.
        *("-c", "/dev/null", "--rootdir", str(folder), "-o", "asyncio_mode=strict"),
        *("-o", "verbosity_assertions=2", "-o", "asyncio_default_fixture_loop_scope=function"),
        *("-o", "python_files=*_checks.py", "-o", "python_classes=Check*"),
        *(() if only is None else ("-k", _expression(only))),
    ]
    ended = pytest.ExitCode(pytest.main(arguments, plugins=[plugin]))
    sys.stderr.write("\n")
    if plugin.broken:
        raise RuntimeError("\n".join(plugin.broken))
    if ended not in _WHOLE:
        raise RuntimeError(f"pytest ended with {ended.name}: not all checks were run")
    checks = list(plugin.checks.values())
    if only is None:
        checks.extend(
            Check(part=part, name=_NAMES[part], outcome=Outcome.SKIPPED, seen=why)
            for part, why in lacking.items()
        )
    return checks


def _node(part: str) -> str:
    """Returns the pytest node of a part, relative to the folder of checks."""
    if part in _OF_CONTRACT:
        return f"contract_checks.py::Check{part.capitalize()}"
    return f"{part}_checks.py"


def _part(nodeid: str) -> str:
    return next(part for part in _PARTS if nodeid.startswith(_node(part)))


def _expression(words: str) -> str:
    """Alternatives of words that stand one after another in a name."""
    return " or ".join("_".join(part.split()) for part in words.split(" or "))


def _check(report: pytest.TestReport) -> Check:
    name = report.nodeid.rpartition("::")[2].removeprefix("test_")
    plain, bracket, value = name.partition("[")
    outcome = {"passed": Outcome.HOLDS, "skipped": Outcome.SKIPPED}.get(
        report.outcome, Outcome.FAILS
    )
    return Check(
        part=_part(report.nodeid).replace("_", " "),
        name=plain.replace("_", " ") + (f" {bracket}{value}" if bracket else ""),
        outcome=outcome,
        seen=" ".join(_seen(report, outcome)),
    )


def _seen(report: pytest.TestReport, outcome: Outcome) -> Iterator[str]:
    if outcome is Outcome.SKIPPED and isinstance(report.longrepr, tuple):
        yield str(report.longrepr[2]).removeprefix("Skipped: ")
    elif outcome is Outcome.FAILS:
        yield _crash(report.longrepr)
    for key, value in report.user_properties:
        if key == "seen":
            yield str(value)


def _crash(longrepr: Any) -> str:
    """The message of what was raised; of an assertion, what it compared."""
    crash = getattr(longrepr, "reprcrash", None)
    text = str(longrepr) if crash is None else str(crash.message)
    text = " ".join(text.partition("debug_error_string")[0].split())
    return text.removeprefix("AssertionError: ").removeprefix("Failed: ")
