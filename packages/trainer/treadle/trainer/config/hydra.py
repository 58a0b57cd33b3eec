"""Files of Hydra's form: which files a command line of verl names, in their order.

verl composes its configuration with Hydra: a file lists others under `defaults`, by name. Here the
lists are followed as far as they name files of the same directory, and verl's own ones stand for
its defaults, which are known (`verl.defaults`). Groups of options are not followed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from treadle.trainer.config.verl_keys import ConfigError

__all__ = ["OF_HYDRA", "composed", "named_file"]

_VERL_FILES = ("ppo_trainer", "ppo_megatron_trainer")
"""verl's own files, whose settings are its defaults."""
_SELF = "_self_"
OF_HYDRA: Final = ("defaults", "hydra")
"""Keys that configure Hydra itself, and set nothing here."""


def named_file(directory: str | None, name: str | None) -> Path | None:
    """Returns the file that `--config-path` and `--config-name` name; None for verl's own.

    Raises:
        ConfigError: They name no file.
    """
    if name is None:
        if directory is None:
            return None
        raise ConfigError(f"--config-path={directory} needs --config-name=NAME, a file of it")
    folder = Path(directory or "config").expanduser()
    file = folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if file.is_file():
        return file
    if name.removesuffix(".yaml") in _VERL_FILES:
        return None
    raise ConfigError(
        f"--config-path={folder} --config-name={name}: there is no file {file.absolute()}"
    )


def composed(content: Mapping[Any, Any], file: Path) -> list[Path | Mapping[Any, Any]]:
    """Returns what a file consists of, later ones winning: files, and its own settings.

    Raises:
        ConfigError: `defaults` lists something else than files.
    """
    listed = content.get("defaults", [])
    if not isinstance(listed, list):
        raise ConfigError(f"{file}: defaults={listed!r} is not a list of files")
    own = {key: value for key, value in content.items() if key not in OF_HYDRA}
    if _SELF not in listed:
        listed = [*listed, _SELF]
    return [
        own if entry == _SELF else _beside(entry, file)
        for entry in listed
        if entry not in _VERL_FILES
    ]


def _beside(entry: Any, file: Path) -> Path:
    """Returns the file that an entry of `defaults` names."""
    beside = file.parent / f"{entry}.yaml"
    if not isinstance(entry, str) or not beside.is_file():
        raise ConfigError(
            f"{file}: defaults has {entry!r}, and only {', '.join(_VERL_FILES)} and files of "
            f"{file.parent} are read: write its settings into the file, or give it by --config"
        )
    return beside
