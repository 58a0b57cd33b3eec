"""Runs every check once, through pytest, and collects the outcomes.

Invariant: a check that cannot run is skipped with a reason and never counts as one that holds. A
check whose own code does not load is an error of the kit and ends the run. The remaining checks
are skipped once the server is gone, or after several checks failed by waiting too long.
"""

import asyncio
import enum
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from treadle.conformance.contracts import CONTRACTS
from treadle.conformance.contracts.remote_contract import Target
from treadle.conformance.settings import KitSettings, why_lost

_PARTS = (
    *("handshake", "generation", "pauses", "updates", "calls_again", "in_place", "files"),
    *("delta", "shared_memory", "collective", "group", "engine", "model", "left_open"),
)
"""The order of the run. The last part checks what the others left behind."""
_OF_CONTRACT = ("group", "engine", "model")
"""Parts that are one class each of contract_checks.py; every other part is a file."""
_COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
_SLOW_S = 60.0
_MAX_SLOW_FAILURES = 3
_SKIPPED_NAMES = {
    "model": "its tokens and log-probs are those of transformers",
    "group": "what senders broadcast to a group is what an update brings",
}
"""The one line in the table for a part that is skipped as a whole."""


class ContractOutcome(enum.Enum):
    """The outcome of a check."""

    HOLDS = "holds"
    FAILS = "does not"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check and its outcome.

    Attributes:
        part: The part of the table, such as "updates".
        name: The clause of the contract, such as "a corrupt chunk is refused".
        seen: Why the check was skipped, what was seen instead, or a measured value.
    """

    part: str
    name: str
    outcome: ContractOutcome
    seen: str


class Collector(ABC):
    """A pytest plugin that collects the outcomes of checks."""

    def __init__(self, parts: Mapping[str, str]) -> None:
        """Args: parts: Part of the table by its file or class, relative to the checks' folder."""
        self._parts = parts
        self._slow_failures = 0
        self._stop_reason = ""
        self.checks: dict[str, CheckResult] = {}
        self.broken: list[str] = []

    @abstractmethod
    def why_lost(self) -> str | None:
        """Returns why no more checks can run on the server, or None if they can."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Shows no source: Python 3.11 may fail to parse source that is nested this deep."""
        config.option.tbstyle = "native"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Records check files that do not load; that is an error of the kit."""
        if report.failed:
            self.broken.append(str(report.longrepr))

    def pytest_runtest_setup(self) -> None:
        """Skips the check if the run has stopped."""
        if self._stop_reason:
            pytest.skip(self._stop_reason)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records a check; of its phases, the first that did not pass decides."""
        known = self.checks.get(report.nodeid)
        if known is not None and known.outcome is not ContractOutcome.HOLDS:
            return
        if report.passed and report.when != "call":
            return
        self.checks[report.nodeid] = self._check(report)
        if report.when == "call" or not report.passed:
            sys.stderr.write("." if report.passed else "s" if report.skipped else "F")
            sys.stderr.flush()
        if report.failed:
            self._stop_reason = self._stop_reason or self._why_stop(report)

    def _check(self, report: pytest.TestReport) -> CheckResult:
        return _check(
            report, next(p for node, p in self._parts.items() if report.nodeid.startswith(node))
        )

    def _why_stop(self, report: pytest.TestReport) -> str:
        """Returns why the run stops after this failed check, or "" if it continues."""
        name = self._check(report).name
        if why := self.why_lost():
            return f"since {name!r}, {why}"
        self._slow_failures += report.duration > _SLOW_S
        if self._slow_failures < _MAX_SLOW_FAILURES:
            return ""
        return (
            f"{_MAX_SLOW_FAILURES} checks failed after {_SLOW_S:.0f} s each, {name!r} was the "
            "last: fix them first, or select others with --only"
        )


class Plugin(Collector):
    """The plugin that gives checks of the rollout contract their settings."""

    def __init__(self, settings: KitSettings) -> None:
        super().__init__({_node(part): part.replace("_", " ") for part in _PARTS})
        self._settings = settings

    @pytest.fixture(scope="session")
    def settings(self) -> KitSettings:
        """Returns the settings of the kit."""
        return self._settings

    @pytest.fixture(scope="session")
    def target(self) -> Target:
        """Returns the server under test."""
        return self._settings.target

    def why_lost(self) -> str | None:
        """See the base class."""
        return asyncio.run(why_lost(self._settings))

    def pytest_configure(self, config: pytest.Config) -> None:
        """Registers the contracts for assertion rewriting, before the checks import them."""
        pytest.register_assert_rewrite(*CONTRACTS)
        super().pytest_configure(config)


def run(
    settings: KitSettings, skipped_parts: Mapping[str, str], *, only: str | None = None
) -> list[CheckResult]:
    """Runs the checks, which takes minutes.

    Args:
        settings: The server and the options.
        skipped_parts: Parts that cannot run, with the reason; their checks import torch.
        only: Words that select checks by name, alternatives separated by "or".

    Raises:
        RuntimeError: A check file does not load, or not all checks ran.
    """
    nodes = [_node(part) for part in _PARTS if part not in skipped_parts]
    checks = run_checks(Plugin(settings), Path(__file__).parent / "checks", nodes, only=only)
    if only is None:
        checks.extend(
            CheckResult(
                part=part, name=_SKIPPED_NAMES[part], outcome=ContractOutcome.SKIPPED, seen=why
            )
            for part, why in skipped_parts.items()
        )
    return checks


def run_checks(
    plugin: Collector, folder: Path, nodes: Iterable[str], *, only: str | None
) -> list[CheckResult]:
    """Runs the checks of a folder; see `run`.

    Args:
        nodes: Files and classes of the folder, in the order of the run.
    """
    arguments = [
        *(str(folder / node) for node in nodes),
        *("-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib"),
        *("-p", "pytest_asyncio.plugin"),
        # Ignores the pytest configuration of the current directory.
        *("-c", "/dev/null", "--rootdir", str(folder), "-o", "asyncio_mode=strict"),
        *("-o", "verbosity_assertions=2", "-o", "asyncio_default_fixture_loop_scope=function"),
        *("-o", "python_files=*_checks.py", "-o", "python_classes=Check*"),
        *(() if only is None else ("-k", _expression(only))),
    ]
    # Other plugins that are installed here may change or slow down the run; the options that the
    # user gives pytest may be unknown to it without them.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("PYTEST_ADDOPTS", None)
    ended = pytest.ExitCode(pytest.main(arguments, plugins=[plugin]))
    sys.stderr.write("\n")
    if plugin.broken:
        raise RuntimeError("\n".join(plugin.broken))
    if ended not in _COMPLETE:
        raise RuntimeError(f"pytest ended with {ended.name}: not all checks were run")
    return list(plugin.checks.values())


def _node(part: str) -> str:
    """Returns the pytest node of a part, relative to the folder of checks."""
    if part in _OF_CONTRACT:
        return f"contract_checks.py::Check{part.capitalize()}"
    return f"{part}_checks.py"


def _expression(words: str) -> str:
    """Returns the ``-k`` expression: "a b or c" becomes "a_b or c"."""
    return " or ".join("_".join(part.split()) for part in words.split(" or "))


def _check(report: pytest.TestReport, part: str) -> CheckResult:
    name = report.nodeid.rpartition("::")[2].removeprefix("test_")
    plain, bracket, value = name.partition("[")
    outcome = {"passed": ContractOutcome.HOLDS, "skipped": ContractOutcome.SKIPPED}.get(
        report.outcome, ContractOutcome.FAILS
    )
    return CheckResult(
        part=part,
        name=plain.replace("_", " ") + (f" {bracket}{value}" if bracket else ""),
        outcome=outcome,
        seen=" ".join(_seen(report, outcome)),
    )


def _seen(report: pytest.TestReport, outcome: ContractOutcome) -> Iterator[str]:
    if outcome is ContractOutcome.SKIPPED and isinstance(report.longrepr, tuple):
        yield str(report.longrepr[2]).removeprefix("Skipped: ")
    elif outcome is ContractOutcome.FAILS:
        yield _crash(report.longrepr)
    for key, value in report.user_properties:
        if key == "seen":
            yield str(value)


def _crash(longrepr: Any) -> str:
    """Returns the message of the exception; for an assertion, the comparison."""
    crash = getattr(longrepr, "reprcrash", None)
    text = str(longrepr) if crash is None else str(crash.message)
    text = " ".join(text.partition("debug_error_string")[0].split())
    return text.removeprefix("AssertionError: ").removeprefix("Failed: ")
