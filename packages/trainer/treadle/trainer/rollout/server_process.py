"""The server process: the program that serves one replica, and its command line.

Invariant: a setting that the configuration leaves at its default is not on the command line, so
that the server's default holds and any server of the contract can be started. The engine's
environment is checked before anything is started: the help text of a separate command must list
every setting.
"""

import importlib.util
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import JsonValue

from treadle.policy.config.weight_sync import CollectiveTransportConfig, FileTransportConfig
from treadle.tracing.sinks.otlp_address import resolved_url
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config
from treadle.trainer.config.topology import Devices
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.launch.environment import cpu_count, thread_variables
from treadle.trainer.launch.own_environment import ask_command, check_command
from treadle.trainer.launch.process import ProcessSpec
from treadle.trainer.rollout.server_security import needs_own_token

__all__ = [
    "ask_server_command",
    "check_server_command",
    "engine_settings",
    "server_spec",
    "server_traces",
]

_COMMAND = "rollout.server_command"
# Engines with an environment of their own, and the library in it.
_LIBRARIES = {"vllm": "vllm", "vllm_stock": "vllm", "sglang": "sglang"}
# Keys of `rollout` that are passed as `model.KEY`, unless they have their default.
_MODEL_KEYS = (
    "tensor_model_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_bytes",
    "max_num_batched_tokens",
    "enforce_eager",
    "enable_prefix_caching",
    "max_draft_tokens",
    "batch_invariant",
)


def engine_settings(rollout: RolloutConfig) -> Mapping[str, JsonValue]:
    """Returns the engine settings that differ from their defaults, by key."""
    keys = (*_MODEL_KEYS, "engine_args")
    values = {key: getattr(rollout, key) for key in keys}
    fields = RolloutConfig.model_fields
    return {key: value for key, value in values.items() if value != fields[key].default}


def server_traces(config: Config, run_dir: Path) -> Path | None:
    """Returns the directory of the servers' spans; None if they are not wanted as files."""
    return (run_dir / "traces").absolute() if "jsonl" in config.tracing.backends else None


def server_otlp(config: Config) -> str | None:
    """Returns the OpenTelemetry endpoint that the run's servers send their spans to, if any.

    Raises:
        ConfigError: It is not an address.
    """
    tracing = config.tracing
    limits = (tracing.max_samples_per_step_per_worker, tracing.max_bytes)
    limited = tracing.sample_rate < 1 or any(limit is not None for limit in limits)
    if "otlp" not in tracing.backends or not tracing.otlp_servers or limited:
        return None
    try:
        return resolved_url(tracing.otlp_endpoint)
    except ValueError as error:
        raise ConfigError(f"tracing.otlp_endpoint: {error}") from None


def _otel_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}


def server_spec(
    config: Config,
    name: str,
    *,
    weights_directory: Path | None,
    traces: Path | None = None,
    devices: Devices | None = None,
) -> ProcessSpec:
    """Returns the process specification of one replica's server.

    Args:
        name: The name of the process.
        weights_directory: Where the files of the file transport are; None: no weights will come.
        traces: Directory of the file with the server's spans; None: it records none.
        devices: Its GPUs; None: they are not assigned.
    """
    arguments = dict(_arguments(config, weights_directory))
    if traces is not None:
        arguments["tracing.jsonl"] = str(traces / f"{name}.jsonl")
    return ProcessSpec(
        name=name,
        module="treadle.rollout_server",
        command=config.rollout.server_command,
        args=tuple(part for key, value in arguments.items() for part in (f"--{key}", value)),
        env={
            **thread_variables(_threads(config.rollout)),
            # On another node the driver's variables are not there.
            **({} if server_otlp(config) is None else _otel_variables()),
        },
        devices=devices,
        gpus=getattr(config.launch, "gpus_per_replica", 0.0),
        placement="spread",
    )


def check_server_command(config: Config) -> None:
    """Checks that the servers can be started.

    Raises:
        ConfigError: A TLS file or the token file is missing, or the engine is not in this
            interpreter's environment and no command names another one, or the command is not on
            this machine, where the servers will run.
    """
    rollout = config.rollout
    for key in ("tls_certificate", "tls_key", "tls_roots", "token_file"):
        path = getattr(rollout, key)
        if path is not None and not path.is_file():
            raise ConfigError(f"rollout.{key}={path}: there is no such file on this machine")
    if rollout.server_command:
        if config.launch.kind == "local":
            check_command(_COMMAND, rollout.server_command)
    elif (
        rollout.num_replicas
        and (library := _LIBRARIES.get(rollout.name)) is not None
        and importlib.util.find_spec(library) is None
    ):
        raise ConfigError(
            f"rollout.name={rollout.name}, and this interpreter has no {library}: set "
            "rollout.server_command to what starts a server in its environment, as "
            f"/opt/{library}/bin/treadle-rollout-server"
        )


def ask_server_command(config: Config) -> str:
    """Runs the server's command with `--help`; returns one line about the result.

    Raises:
        ConfigError: The command does not run, or its help lacks a setting of this run.
    """
    command = config.rollout.server_command
    wanted = [key for key, _ in _arguments(config, Path("weights"))]
    if needs_own_token(config):
        wanted.append("security.token_file")
    if server_traces(config, Path()) is not None:
        wanted.append("tracing.jsonl")
    shown = shlex.join((*command, "--help"))
    answer = ask_command(_COMMAND, command, "--help")
    if missing := [f"--{key}" for key in wanted if f"--{key} " not in answer]:
        raise ConfigError(
            f"{_COMMAND}: the server of `{shown}` does not know {', '.join(missing)}, "
            "which this run would give it: install the release of treadle-rollout-server that "
            "belongs to this trainer there"
        )
    return f"`{shown}` knows all {len(wanted)} settings that a server of this run is given"


def _arguments(config: Config, weights_directory: Path | None) -> Iterator[tuple[str, str]]:
    rollout = config.rollout
    yield "engine", rollout.name
    yield "address", "{host}:0"
    yield "model.path", str(config.model.path)
    yield "model.dtype", rollout.dtype
    yield "model.context_length", str(rollout.context_length)
    yield "model.num_threads", str(_threads(rollout))
    yield "model.max_num_seqs", str(rollout.max_in_flight)
    for key, value in engine_settings(rollout).items():
        yield (key if key == "engine_args" else f"model.{key}"), json.dumps(value)
    yield "admission.max_in_flight", str(rollout.max_in_flight)
    # One server must be able to queue what all servers have in flight: the others may die.
    yield (
        "admission.max_queued",
        str(rollout.max_in_flight * (rollout.num_replicas + len(rollout.addresses))),
    )
    if weights_directory is not None and isinstance(config.sync.transport, FileTransportConfig):
        yield "weights.directory", str(weights_directory)
    transport = config.sync.transport
    if isinstance(transport, CollectiveTransportConfig) and transport.allow_plaintext:
        yield "weights.allow_plaintext_group", "true"
    for option in ("tls_certificate", "tls_key", "token_file"):
        if (path := getattr(rollout, option)) is not None:
            yield f"security.{option}", str(path)
    if (endpoint := server_otlp(config)) is not None:
        yield "tracing.otlp", endpoint
    if getattr(config.launch, "allow_plaintext_on_network", False):
        yield "insecure_allow_plaintext_beyond_loopback", "true"


def _threads(rollout: RolloutConfig) -> int:
    return rollout.threads or max(1, cpu_count() // max(1, rollout.num_replicas))
