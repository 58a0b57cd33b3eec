"""The configuration of an evaluation: that of a run, of files, or of the demo, and what is given.

Invariant: `data.val_files` are the files that are evaluated, and `model.path` has the tokenizer. No
server but the one that is evaluated, or those that are started with the model, takes part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from treadle.trainer.config.load import ConfigError, LoadedConfig, load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.demo import DEMO
from treadle.trainer.evaluation.source import Source

__all__ = ["Settings", "load_settings"]

_DEMO_MODEL = "demo:calculator"
# Training rows are not read; the configuration has some all the same.
_NO_TRAINING = "data.train_files=none"
# An API has its own tokenizer and template.
_NO_MODEL = "model.path=none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The configuration, and notes on it for the user."""

    config: Config
    notes: tuple[str, ...]


def load_settings(
    source: Source,
    *,
    files: Sequence[Path],
    overrides: Sequence[str],
    data: Sequence[str] = (),
    samples: int | None = None,
    limit: int | None = None,
) -> Settings:
    """Merges what describes an evaluation.

    Args:
        source: The model or run that is evaluated. The configuration of a run comes first; the
            model demo:calculator brings the demo's if there are no `files`.
        files: YAML files; later ones override earlier ones.
        overrides: `key=value` arguments; they override files.
        data: Data files, in place of the configuration's, read to their end unless there is a
            limit.
        samples: Trajectories per row; None: `rollout.val.samples_per_prompt`.
        limit: Maximum number of rows; None: `data.max_val_rows`.

    Raises:
        ConfigError: There is no data or no tokenizer, a file cannot be read, a key is unknown, or a
            value is invalid.
    """
    named = _value_of("model.path", overrides)
    if source.model is not None and named is not None:
        raise ConfigError(
            f"model.path={named} contradicts {source.text}, whose model is evaluated: leave it out"
        )
    if source.config is not None:
        files = [source.config, *files]
    elif not files and _DEMO_MODEL in (source.model, named):
        files = [DEMO]
    if source.address is not None and not files and named is None:
        raise ConfigError(
            f"{source.address} serves tokens, and prompts are rendered here: give --config FILE "
            "of the run, or model.path=MODEL with the tokenizer and chat template of what it serves"
        )
    given = []
    if data:
        given += [f"data.val_files=[{', '.join(map(_quoted, data))}]", "data.max_val_rows=null"]
    given += overrides
    if samples is not None:
        given.append(f"rollout.val.samples_per_prompt={samples}")
    if limit is not None:
        given.append(f"data.max_val_rows={limit}")
    if source.model is not None:
        given.append(f"model.path={_quoted(source.model)}")
    below = [_NO_TRAINING] if source.url is None else [_NO_TRAINING, _NO_MODEL]
    loaded = load_config(files, given, below=below)
    config, notes = _without_others(_config(loaded), source)
    return Settings(config=config, notes=(*loaded.notes, *notes, *_greedy(config)))


def _config(loaded: LoadedConfig) -> Config:
    data = loaded.config.data
    if not data.val_files:
        raise ConfigError(
            "there is no data to evaluate on: give --data FILE, or a configuration that has "
            "data.val_files"
        )
    if loaded.sources["data.train_files"] == _NO_TRAINING:
        data = data.model_copy(update={"train_files": data.val_files})
    return loaded.config.model_copy(update={"data": data})


def _without_others(config: Config, source: Source) -> tuple[Config, tuple[str, ...]]:
    """Leaves out the servers of `rollout.addresses`, whose weights are not those of a model."""
    rollout = config.rollout
    if not rollout.addresses:
        return config, ()
    count = max(1, rollout.num_replicas)
    alone = rollout.model_copy(update={"addresses": (), "num_replicas": count})
    notes = (
        f"rollout.addresses=[{', '.join(rollout.addresses)}] is left out: those servers hold other "
        f"weights than {source.text}, so rollout.num_replicas={count} are started; to evaluate "
        "what one of them serves, give its address instead",
    )
    without = config.model_copy(update={"rollout": alone})
    return without, notes if source.model is not None else ()


def _greedy(config: Config) -> tuple[str, ...]:
    val = config.rollout.val
    if val.temperature or val.samples_per_prompt == 1:
        return ()
    return (
        f"rollout.val.temperature=0 is greedy, so the {val.samples_per_prompt} samples of a row "
        "are the same: raise it for pass@k",
    )


def _value_of(key: str, overrides: Sequence[str]) -> str | None:
    values = [text.partition("=")[2] for text in overrides if text.startswith(f"{key}=")]
    return values[-1] if values else None


def _quoted(text: str) -> str:
    """Returns the text as a value that is nothing but this text."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
