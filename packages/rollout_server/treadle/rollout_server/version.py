"""The installed version of this package."""

from importlib.metadata import PackageNotFoundError, version


def server_version() -> str:
    """Returns the version in the wheel's metadata; "source" when run from a source tree."""
    try:
        return version("treadle-rollout-server")
    except PackageNotFoundError:
        return "source"
