"""The version of this package, as it was installed."""

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    """As in the wheel's metadata; "source" when run from a source tree."""
    try:
        return version("treadle-rollout-server")
    except PackageNotFoundError:
        return "source"
