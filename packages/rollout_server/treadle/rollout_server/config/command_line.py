"""Parses the command line and a YAML file into a `ServerConfig`.

Invariant: every flag is a field of the configuration, named by its path
(``--admission.max_in_flight 8``); the command line overrides the file. All errors are reported as
one `ServerConfigError` that names the key, the value, and the nearest known key.
"""

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from treadle.rollout_server.config.model_directory import ModelPathError, model_directory
from treadle.rollout_server.config.schema import ServerConfig

PROGRAM = "python -m treadle.rollout_server"


class ServerConfigError(ValueError):
    """The configuration is invalid; the message is for the user."""


class _Command(ServerConfig, BaseSettings):
    """Serves token generation and weight updates over gRPC.

    With "doctor" before the options, checks whether the server can run here instead.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_prog_name=PROGRAM,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_shortcuts={},
    )

    config: Path | None = Field(
        default=None, description="YAML file with these keys; the command line overrides it."
    )


def parse(argv: Sequence[str]) -> ServerConfig:
    """Reads the command line.

    Args:
        argv: Arguments without the program name.

    Raises:
        ServerConfigError: A key is unknown, or a value is out of range or contradictory.
        SystemExit: With code 0, after ``--help``.
    """
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(_Command, cli_parse_args=list(argv))
        given = source()
        path = given.get("config")
        from_file = {} if path is None else _read_yaml(Path(path))
        merged = InitSettingsSource(_Command, _merged(from_file, given))()
        merged.pop("config", None)
        return _with_local_model(ServerConfig.model_validate(merged))
    except SettingsError as error:
        raise ServerConfigError(f"{error}{_hint(str(error).split(), _flags())}") from None
    except ValidationError as error:
        raise ServerConfigError("\n".join(_explain(error))) from None
    except ModelPathError as error:
        raise ServerConfigError(str(error)) from None


def _with_local_model(config: ServerConfig) -> ServerConfig:
    """Returns the configuration with the directory of its model."""
    if config.model.path is None:
        return config
    path = model_directory(config.model.path)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ServerConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ServerConfigError(f"--config {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ServerConfigError(f"--config {path}: expected keys and values, got {values!r}")
    return values


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merges `above` into `below`, key by key; replaces lists and scalars."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = _merged(old, value)
        result[key] = value
    return result


def _explain(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            yield f"{key} is not a key{_hint([key], list(_keys(ServerConfig)))}"
        else:
            message = problem["msg"].removeprefix("Value error, ")
            shown = "" if problem["loc"] == () else f" is {problem['input']!r}"
            yield f"{key}{shown}: {message}"


def _hint(words: Sequence[str], known: Sequence[str]) -> str:
    """Suggests the known words nearest to the unknown ones."""
    near = [
        match
        for word in words
        if word.partition("=")[0] not in known
        for match in difflib.get_close_matches(word.partition("=")[0], known, n=2)
    ]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _flags() -> list[str]:
    return ["--config", *(f"--{key}" for key in _keys(ServerConfig))]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yields the path of every leaf."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        else:
            yield prefix + name
