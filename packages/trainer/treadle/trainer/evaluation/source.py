"""The source of an evaluation: a model, the model of a run, or that of a server or an API.

Invariant: a `Source` names something that exists, or has the form of an address.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from treadle.agent_loop import SetupError
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    CONFIG,
    Checkpoints,
    RunDirectoryError,
)
from treadle.trainer.config.load import is_sft
from treadle.trainer.demo import MODELS
from treadle.trainer.hub import is_model_id

__all__ = ["Source", "find_source"]

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(?P<port>\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The model that is evaluated.

    Attributes:
        model: The value for `model.path`; None: the configuration's, for the tokenizer alone.
        run: The run directory that the model is of.
        step: Number of steps that the run's model was trained.
        config: The configuration of the run at that step.
        address: host:port of a server that serves the model.
        url: Base of an OpenAI-compatible API that serves the model.
        api_model: Name of the model at this URL.
    """

    text: str
    model: str | None = None
    run: Path | None = None
    step: int | None = None
    config: Path | None = None
    address: str | None = None
    url: str | None = None
    api_model: str | None = None


def find_source(text: str, *, step: int | None = None, api_model: str | None = None) -> Source:
    """Returns what the text names.

    Args:
        text: A model directory, a run directory, one of its checkpoints, the id of a model on the
            Hub, demo:NAME, host:port, or a URL. An existing path wins.
        step: Step of a run's checkpoint; None: the latest one.
        api_model: Name of the model at a URL, which may serve several.

    Raises:
        SetupError: There is no such thing, or no such step.
    """
    path = Path(text).expanduser()
    is_url = re.match("https?://", text, re.IGNORECASE) is not None
    if is_url and not path.exists():
        _check_url(text)
    if is_url != (api_model is not None):
        raise SetupError(
            f"{text} may serve several models: give --model NAME"
            if is_url
            else f"--model {api_model}: {text} is not a URL, and names the model already"
        )
    if path.is_dir():
        path = path.absolute()
        if path.parent.name == CHECKPOINTS and path.name.startswith("step-"):
            if step is not None:
                raise SetupError(f"--step {step}: {text} is a checkpoint already; leave one out")
            digits = path.name.removeprefix("step-")
            return _of_run(text, path.parents[1], int(digits) if digits.isdecimal() else -1)
        if _is_run(path):
            return _of_run(text, path, step)
        if not (path / "config.json").is_file():
            raise SetupError(
                f"{text} is neither a model nor a run: it holds no config.json, and no "
                f"{CHECKPOINTS} of a run"
            )
    if step is not None:
        raise SetupError(f"--step {step}: only a run has steps, and {text} is not a run directory")
    if path.is_dir():
        return Source(text=text, model=str(path))
    if path.exists():
        raise SetupError(f"{text} is a file: name the directory of a model or of a run")
    if is_url:
        return Source(text=text, url=text, api_model=api_model)
    if text in MODELS or is_model_id(text):
        return Source(text=text, model=text)
    if (match := _ADDRESS.fullmatch(text)) is not None and 0 < int(match["port"]) < 1 << 16:
        return Source(text=text, address=text)
    raise SetupError(
        f"there is no {text}; it must be a model directory, a run directory, the id of a model on "
        f"the Hub as ORG/NAME, {', '.join(MODELS)}, the address of a server as host:port, or the "
        "URL of an OpenAI-compatible API"
    )


def _check_url(text: str) -> None:
    """Checks the form of a URL; errors show no password.

    Raises:
        SetupError: It is no URL of a host, or holds a user or a password.
    """
    shown = re.sub("//.*@", "//", text)
    try:
        parts = urlsplit(text)
        host, port, has_user = parts.hostname, parts.port, "@" in parts.netloc
    except ValueError as error:
        if shown == text:
            raise SetupError(f"{text} is no URL: {error}; write https://HOST/v1") from None
        has_user = True  # a password may hold what ends a host
    if has_user:
        raise SetupError(
            "the URL holds a user or a password, which results and logs would show: write "
            f"{shown}, and set the environment variable OPENAI_API_KEY to the key"
        )
    if not host or port == 0 or re.search(r"\s", text):
        raise SetupError(
            f"{text} is no URL of a host: write https://HOST/v1 or http://HOST:PORT/v1"
        )


def _is_run(path: Path) -> bool:
    return (path / CHECKPOINTS).is_dir() or (path / "metrics.jsonl").is_file()


def _of_run(text: str, run: Path, step: int | None) -> Source:
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=1)
    try:
        chosen = checkpoints.chosen() if step is None else checkpoints.at(step)
        if chosen is None:
            raise SetupError(f"{text} is a run without a checkpoint: it holds no model yet")
    except RunDirectoryError as error:
        raise SetupError(str(error)) from None
    config = chosen.config_file or run / CONFIG
    return Source(
        text=text,
        model=str(chosen.hf_directory or chosen.policy_directory.parent),
        run=run,
        step=chosen.step,
        config=None if config.is_file() and is_sft(config) else config,
    )
