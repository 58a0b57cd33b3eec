"""The backends by name: which library each needs, and what can be known of it before the run.

Invariant: importing this module loads none of the libraries, and a check starts and writes nothing.
"""

import http.client
import importlib.util
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import urlsplit

from treadle.agent_loop import SetupError
from treadle.tracing.sinks import mlflow, weave
from treadle.tracing.sinks.otlp_address import resolved_url
from treadle.trainer.config.schema import Config
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.problems import Problems

__all__ = ["check_tracing"]

_LIBRARIES: Final[Mapping[str, str]] = MappingProxyType(
    {"mlflow": "mlflow", "otlp": "opentelemetry.exporter.otlp.proto.http", "weave": "weave"}
)
"""The module that a backend imports; each name is an extra of treadle-trainer."""

_ANSWER_S: Final = 5.0
"""Maximum time for a service to answer."""


def check_tracing(config: Config, problems: Problems) -> None:
    """Finds each backend that lacks its library or key, or whose service does not answer."""
    for name in config.tracing.backends:
        with problems.collected():
            if name in _LIBRARIES:
                _check_library(name)
            if name == "weave":
                _check_weave()
            elif name == "mlflow":
                _check_mlflow()
            elif name == "otlp":
                _check_otlp(config.tracing.otlp_endpoint)


def _check_library(name: str) -> None:
    try:
        found = importlib.util.find_spec(_LIBRARIES[name]) is not None
    except ModuleNotFoundError:  # not even its parent is there
        found = False
    if not found:
        raise SetupError(
            f"tracing.backends names {name}, and the library {_LIBRARIES[name]} is not installed: "
            f'pip install "treadle-trainer[{name}]"'
        )


def _check_weave() -> None:
    if not weave.has_credentials():
        raise ConfigError(
            "tracing.backends names weave, and there is no key of Weights & Biases: set "
            "WANDB_API_KEY, or run `wandb login`"
        )
    _check_answers("weave", weave.service_url(), "WANDB_BASE_URL")


def _check_mlflow() -> None:
    try:
        uri = mlflow.tracking_uri()
    except ValueError as error:
        raise ConfigError(f"tracing.backends names mlflow: {error}") from None
    if urlsplit(uri).scheme in ("http", "https"):
        _check_answers("mlflow", uri, "MLFLOW_TRACKING_URI")


def _check_otlp(endpoint: str | None) -> None:
    try:
        url = resolved_url(endpoint)
    except ValueError as error:
        raise ConfigError(f"tracing.otlp_endpoint: {error}") from None
    _check_answers("otlp", url, "tracing.otlp_endpoint or OTEL_EXPORTER_OTLP_ENDPOINT")


def _check_answers(name: str, url: str, setting: str) -> None:
    """Rejects a service that does not answer at all; an error over HTTP is an answer."""
    try:
        urllib.request.urlopen(url, timeout=_ANSWER_S).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except (OSError, http.client.HTTPException) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLError):
            return  # it answers; the client may have other certificates
        raise ConfigError(
            f"tracing.backends names {name}, and {url} does not answer: {cause}. Start the "
            f"service, or set {setting}"
        ) from None
