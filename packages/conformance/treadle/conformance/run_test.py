import subprocess
import sys

import pytest

from treadle.conformance import run
from treadle.conformance.contracts.remote_contract import Target
from treadle.conformance.settings import KitSettings

SETTINGS = KitSettings(
    target=Target(address="127.0.0.1:1"),
    files=None,
    compared=False,
    tolerance=1e-3,
    continue_recomputes=False,
    caches_prefixes=True,
    places=None,
    long=10,
    draws=10,
)


def failed(plugin: run.Plugin, *, duration_s: float) -> None:
    report = pytest.TestReport(
        nodeid="updates_checks.py::CheckBegin::test_it_waits",
        location=("", 0, ""),
        keywords={},
        outcome="failed",
        longrepr="it waited",
        when="call",
        duration=duration_s,
    )
    plugin.checks.clear()
    plugin.pytest_runtest_logreport(report)


def test_a_server_that_makes_checks_wait_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing_is_lost(settings: KitSettings) -> None:
        return None

    monkeypatch.setattr(run, "why_lost", nothing_is_lost)
    plugin = run.Plugin(SETTINGS)
    for duration_s in (61.0, 1.0, 61.0, 1.0):
        failed(plugin, duration_s=duration_s)
    plugin.pytest_runtest_setup()
    failed(plugin, duration_s=61.0)
    with pytest.raises(pytest.skip.Exception, match="3 checks failed after 60 s each, 'it waits'"):
        plugin.pytest_runtest_setup()


def test_a_server_that_is_gone_is_asked_no_more() -> None:
    plugin = run.Plugin(SETTINGS)
    failed(plugin, duration_s=0.0)
    with pytest.raises(pytest.skip.Exception, match=r"since 'it waits', 127\.0\.0\.1:1 does not"):
        plugin.pytest_runtest_setup()


def test_checks_that_need_torch_load_without_it() -> None:
    lines = (
        f"import sys; sys.path[:] = {sys.path!r}",
        "sys.modules['torch'] = sys.modules['transformers'] = None",
        "import treadle.conformance.checks.contract_checks",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
