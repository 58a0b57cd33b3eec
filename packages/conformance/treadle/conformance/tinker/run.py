"""Runs the checks of Tinker's API against a service."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from treadle.conformance.run import CheckResult, Collector, run_checks
from treadle.conformance.settings import Unusable, check_output, read_file
from treadle.conformance.tinker.client import Failed, RemoteService

__all__ = ["run"]

_PARTS: Final = ("handshake", "training", "sampling", "state", "paths")
"""The order of the run. The last part sends a request with an empty body to each path."""


class _Plugin(Collector):
    """The plugin that gives the checks the service."""

    def __init__(self, service: RemoteService, tolerance: float) -> None:
        super().__init__({f"{part}_checks.py": part for part in _PARTS})
        self._service = service
        self._tolerance = tolerance

    @pytest.fixture(scope="session")
    def service(self) -> RemoteService:
        """Returns the client of the service under test."""
        return self._service

    @pytest.fixture(scope="session")
    def tolerance(self) -> float:
        """Returns the maximum difference of log-probabilities that are the same."""
        return self._tolerance

    def why_lost(self) -> str | None:
        """See the base class."""
        try:
            self._service.call("GET", "/healthz", None)
        except Failed as failed:
            return f"{self._service.address} does not answer: {failed}"
        return None


def run(
    options: argparse.Namespace, say: Callable[[str], Any]
) -> tuple[Mapping[str, str], Sequence[CheckResult]]:
    """Runs the checks, some seconds on a small model; returns what the service is, and the results.

    Raises:
        Unusable: An option is wrong, or the service does not answer.
        RuntimeError: Not all checks ran.
    """
    check_output(options)
    token = read_file(options.token_file, "--token-file")
    tls = None
    if read_file(options.ca, "--ca") is not None:
        tls = ssl.create_default_context(cafile=options.ca)
    if not options.tinker.startswith(("http://", "https://")):
        raise Unusable(f"--tinker {options.tinker}: give an URL, such as http://127.0.0.1:8000")
    key = "" if token is None else token.decode().strip()
    service = RemoteService(options.tinker, key, tls)
    try:
        model = service.base_model()
    except (Failed, KeyError, IndexError, TypeError) as error:
        raise Unusable(
            f"{options.tinker} does not answer get_server_capabilities: {error}"
        ) from None
    name, context = str(model.get("model_name")), str(model.get("max_context_length"))
    say(f"{service.address}: {name}, context {context}\n")
    folder = Path(__file__).parent / "checks"
    nodes = [f"{part}_checks.py" for part in _PARTS]
    checks = run_checks(_Plugin(service, options.tolerance), folder, nodes, only=options.only)
    return {"address": service.address, "model": name, "context": context}, checks
