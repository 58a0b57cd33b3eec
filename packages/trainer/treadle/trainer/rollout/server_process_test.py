import sys
from pathlib import Path
from typing import Any

import pytest

from treadle.trainer.config.load import ConfigError
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig, TracingConfig
from treadle.trainer.rollout.server_process import (
    ask_server_command,
    check_server_command,
    server_spec,
    server_traces,
)


def _config(**rollout: Any) -> Config:
    return Config(
        data=DataConfig(train_files=(Path("t.jsonl"),)),
        model=ModelConfig(path=Path("/m")),
        rollout=RolloutConfig.model_validate({"threads": 1, **rollout}),
    )


def _told(config: Config) -> dict[str, str]:
    args = server_spec(config, "rollout-0", weights_directory=Path("/w")).args
    return dict(zip(args[::2], args[1::2], strict=True))


def _all(config: Config) -> list[str]:
    """What a server of a run is told, with the token that the run makes."""
    return [*_told(config), "--security.token_file"]


def test_a_server_is_told_what_was_set_and_nothing_else() -> None:
    plain = _told(_config())
    assert "--model.tensor_model_parallel_size" not in plain
    assert "--engine_args" not in plain
    told = _told(
        _config(
            name="vllm",
            tensor_model_parallel_size=2,
            gpu_memory_utilization=0.85,
            enforce_eager=True,
            enable_prefix_caching=False,
            engine_args={"block_size": 16, "compilation_config": {"level": 0}},
        )
    )
    assert told.items() - plain.items() == {
        ("--engine", "vllm"),
        ("--model.tensor_model_parallel_size", "2"),
        ("--model.gpu_memory_utilization", "0.85"),
        ("--model.enforce_eager", "true"),
        ("--model.enable_prefix_caching", "false"),
        ("--engine_args", '{"block_size": 16, "compilation_config": {"level": 0}}'),
    }


def test_a_server_writes_its_spans_beside_those_of_the_run() -> None:
    traced = _config().model_copy(update={"tracing": TracingConfig(backends=("jsonl",))})
    traces = server_traces(traced, Path("/run"))
    args = server_spec(traced, "rollout-1", weights_directory=None, traces=traces).args
    told = dict(zip(args[::2], args[1::2], strict=True))
    assert told["--tracing.jsonl"] == "/run/traces/rollout-1.jsonl"
    assert server_traces(_config(), Path("/run")) is None


def test_a_server_sends_its_spans_where_the_run_sends_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=key")

    def sent(**settings: Any) -> tuple[str | None, str | None]:
        tracing = TracingConfig(
            backends=("otlp",), otlp_endpoint="https://traces.example/otel", **settings
        )
        config = _config().model_copy(update={"tracing": tracing})
        spec = server_spec(config, "rollout-0", weights_directory=None)
        return _told(config).get("--tracing.otlp"), spec.env.get("OTEL_EXPORTER_OTLP_HEADERS")

    assert sent() == ("https://traces.example/otel/v1/traces", "Authorization=key")
    # They do not know what is left out.
    for limit in ({"sample_rate": 0.5}, {"max_bytes": 1}, {"max_samples_per_step_per_worker": 1}):
        assert sent(**limit) == (None, None)
    assert sent(otlp_servers=False) == (None, None)
    assert "--tracing.otlp" not in _told(_config())


def test_the_command_takes_the_place_of_the_interpreter() -> None:
    command = ("/opt/vllm/bin/treadle-rollout-server",)
    spec = server_spec(_config(server_command=command), "r", weights_directory=Path("/w"))
    assert spec.command == command


def test_an_engine_that_is_nowhere_is_refused_with_the_key_to_set() -> None:
    with pytest.raises(ConfigError, match=r"has no sglang: set rollout\.server_command"):
        check_server_command(_config(name="sglang"))
    with pytest.raises(ConfigError, match="no program '/nowhere/server' on this machine"):
        check_server_command(_config(name="sglang", server_command=("/nowhere/server",)))
    check_server_command(_config(name="sglang", server_command=(sys.executable,)))
    check_server_command(_config(name="torch"))


def test_a_server_that_answers_for_other_settings_is_refused() -> None:
    known = [key for key in _all(_config()) if key != "--model.dtype"]
    text = f"print({' text '.join([*known, ''])!r})"
    with pytest.raises(ConfigError, match=r"does not know --model\.dtype, which"):
        ask_server_command(_config(server_command=(sys.executable, "-c", text)))


def test_a_server_that_knows_every_setting_says_so() -> None:
    known = _all(_config(name="vllm", kv_cache_bytes=1))
    command = (sys.executable, "-c", f"print({' text '.join([*known, ''])!r})")
    said = ask_server_command(_config(name="vllm", kv_cache_bytes=1, server_command=command))
    assert said.endswith(f"knows all {len(known)} settings that a server of this run is given")


def test_tls_needs_its_files_and_tells_the_server_where_they_are(tmp_path: Path) -> None:
    files = {key: tmp_path / key for key in ("tls_certificate", "tls_key", "token_file")}
    config = _config(**files)
    for key, path in files.items():
        with pytest.raises(ConfigError, match=rf"rollout\.{key}=.* no such file"):
            check_server_command(config)
        path.touch()
    check_server_command(config)
    told = _told(config)
    assert told.items() - _told(_config()).items() == {
        (f"--security.{key}", str(path)) for key, path in files.items()
    }
    with pytest.raises(ValueError, match="belong together"):
        _config(tls_key=Path("key"))
    with pytest.raises(ValueError, match="tls_certificate is null"):
        _config(tls_roots=Path("roots"))
