"""The address of an OTLP endpoint. Needs no library, so that it can be given to another process."""

import os
from typing import Final
from urllib.parse import urlsplit

__all__ = ["resolved_url", "traces_url"]

_PATH: Final = "/v1/traces"


def traces_url(endpoint: str) -> str:
    """Returns the address of an endpoint's traces.

    Raises:
        ValueError: It is not an HTTP address.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"{endpoint!r} is not the address of an OTLP endpoint: give one as "
            "http://localhost:4318 or https://HOST/PATH"
        )
    path = parts.path.rstrip("/")
    return parts._replace(path=path if path.endswith(_PATH) else path + _PATH).geturl()


def resolved_url(endpoint: str | None) -> str:
    """Returns the address that spans are sent to, from the variables where `endpoint` is None.

    Raises:
        ValueError: It is not an HTTP address.
    """
    if endpoint is None and (exact := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")):
        return exact
    default = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or "http://localhost:4318"
    return traces_url(default if endpoint is None else endpoint)
