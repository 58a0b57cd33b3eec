"""The fuzz targets by name."""

from collections.abc import Callable, Mapping

from fuzz.target import Target


def _contract() -> Target:
    from fuzz.targets.contract import ContractTarget

    return ContractTarget()


def _router() -> Target:
    from fuzz.targets.router import RouterTarget

    return RouterTarget()


def _parsers() -> Target:
    from fuzz.targets.parsers import ParsersTarget

    return ParsersTarget()


def _endpoint() -> Target:
    from fuzz.targets.endpoint import EndpointTarget

    return EndpointTarget()


def _sandbox() -> Target:
    from fuzz.targets.sandbox import SandboxTarget

    return SandboxTarget()


def _run_directory() -> Target:
    from fuzz.targets.run_directory import RunDirectoryTarget

    return RunDirectoryTarget()


def _config() -> Target:
    from fuzz.targets.config import ConfigTarget

    return ConfigTarget()


def _service() -> Target:
    from fuzz.targets.service import ServiceTarget

    return ServiceTarget()


def _passes() -> Target:
    from fuzz.targets.service import PassesTarget

    return PassesTarget()


TARGETS: Mapping[str, Callable[[], Target]] = {
    "contract": _contract,
    "router": _router,
    "parsers": _parsers,
    "endpoint": _endpoint,
    "sandbox": _sandbox,
    "run_directory": _run_directory,
    "config": _config,
    "service": _service,
    "passes": _passes,
}
"""Each imports what it needs when it is made."""
