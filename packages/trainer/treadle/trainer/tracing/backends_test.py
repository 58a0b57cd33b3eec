"""What is wrong with a backend is said before the run; services are real ones on loopback."""

import os
import sys
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.tracing.sinks.testing import http_server
from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.problems import Problems
from treadle.trainer.tracing.backends import check_tracing

_NOWHERE = "http://127.0.0.1:9"


def check(*overrides: str) -> None:
    problems = Problems(ConfigError, SetupError)
    check_tracing(load_config([DEMO], list(overrides)).config, problems)
    problems.raise_if_any()


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in list(os.environ):
        if name.startswith(("WANDB_", "WF_", "OTEL_", "MLFLOW_")) or name.lower() == "http_proxy":
            monkeypatch.delenv(name)


def test_a_service_that_answers_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with http_server(lambda _: (405, "text/plain", b"POST only")) as address:
        monkeypatch.setenv("WANDB_API_KEY", "key")
        monkeypatch.setenv("WF_TRACE_SERVER_URL", address)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        check("tracing.backends=[jsonl,weave,mlflow,otlp]", f"tracing.otlp_endpoint={address}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        check("tracing.backends=otlp")


@pytest.mark.parametrize(
    ("override", "environment", "message"),
    [
        ("tracing.backends=weave", {}, "no key of Weights & Biases: set WANDB_API_KEY"),
        (
            "tracing.backends=weave",
            {"WANDB_API_KEY": "key", "WANDB_BASE_URL": _NOWHERE},
            f"{_NOWHERE}/traces does not answer: .*WANDB_BASE_URL",
        ),
        (
            "tracing.backends=mlflow",
            {"MLFLOW_TRACKING_URI": _NOWHERE},
            f"{_NOWHERE} does not answer: .*MLFLOW_TRACKING_URI",
        ),
        ("tracing.backends=mlflow", {"MLFLOW_TRACKING_URI": "./mlruns"}, "stores no spans"),
        (
            "tracing.backends=otlp",
            {"OTEL_EXPORTER_OTLP_ENDPOINT": _NOWHERE},
            f"{_NOWHERE}/v1/traces does not answer: .*tracing.otlp_endpoint",
        ),
        ("tracing.backends=otlp tracing.otlp_endpoint=host:4317", {}, "is not the address"),
    ],
)
def test_what_would_lose_all_traces_is_refused(
    override: str, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        check(*override.split())


@pytest.mark.parametrize("name", ["mlflow", "otlp", "weave"])
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mlflow", "opentelemetry.exporter.otlp.proto.http", "weave"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SetupError, match=rf'pip install "treadle-trainer\[{name}\]"'):
        check(f"tracing.backends={name}")


def test_a_backend_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="'jsonl', 'mlflow', 'otlp' or 'weave'"):
        check("tracing.backends=arize")
    with pytest.raises(ConfigError, match="twice"):
        check("tracing.backends=[jsonl,jsonl]")
    with pytest.raises(ConfigError, match=r"did you mean tracing\.backends"):
        check("tracing.backend=jsonl")
