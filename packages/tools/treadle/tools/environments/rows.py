"""The rows of an environment, made when a run reads its data; no file of rows is written.

    data.train_files=[textarena:GuessTheNumber-v0]      # by name
    data.train_files=[guess.yaml]                       # with settings

The first key of such a YAML file is the library, and its value the environment's name:

    textarena: GuessTheNumber-v0
    rows: 512
    first_seed: 0

Invariant: equal settings give equal rows in the same order, so that a resumed run continues where
it stopped. An environment that cannot be made is an error here, before anything starts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, cast

from treadle.agent_loop import SetupError
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.environments.settings import EnvironmentSettings
from treadle.tools.yaml_config import mapping, read_yaml

LIBRARIES: Final = ("gymnasium", "harbor", "openenv", "textarena", "verifiers")
"""The libraries that an environment may be of."""

_NAME: Final = re.compile(rf"({'|'.join(LIBRARIES)}):(.+)")
_URL: Final = re.compile(r"^(https?|wss?):/+")
_YAML: Final = (".yaml", ".yml")

MakeRows = Callable[[EnvironmentSettings], Iterator[Mapping[str, object]]]


def is_environment(path: Path | str) -> bool:
    """Returns whether a data file is an environment: "LIBRARY:NAME", or a YAML file."""
    return _NAME.fullmatch(str(path)) is not None or Path(path).suffix in _YAML


def read_rows(path: Path | str) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yields the rows of an environment, each with its place.

    Args:
        path: "LIBRARY:NAME", or a YAML file.

    Raises:
        SetupError: The file cannot be read or has unknown keys, the library is not installed, or
            the environment cannot be made.
    """
    settings, make_rows = _read(path)
    for number, columns in enumerate(make_rows(settings), start=1):
        yield f"{path}, row {number}", columns


def _read(path: Path | str) -> tuple[EnvironmentSettings, MakeRows]:
    if (named := _NAME.fullmatch(str(path))) is not None:
        library, name = named.groups()
        # A URL that became a `Path` has lost a slash.
        values: Mapping[str, object] = {library: _URL.sub(r"\1://", name)}
    else:
        values = mapping(read_yaml(Path(path), "environment"), str(path))
    where = str(path)
    found = [key for key in values if key in LIBRARIES]
    if len(found) != 1:
        problem = f"{where} names {len(found)} libraries"
        raise SetupError(f"{problem}; it must have one of the keys {', '.join(LIBRARIES)}")
    (library,) = found
    name_of = values[library]
    if not isinstance(name_of, str) or not name_of:
        raise SetupError(f"{where}: {library} must be an environment's name, got {name_of!r:.80}")
    try:
        module = importlib.import_module(f"treadle.tools.environments.{library}")
    except ModuleNotFoundError as error:  # of an extra that the library's one needs
        raise SetupError(f"{where}: {error}") from error
    known = cast(tuple[str, ...], module.KEYS)
    for key in values:
        if key != library and key not in known:
            raise SetupError(
                f"{where}: unknown key {key!r}{did_you_mean(str(key), known)}; known are "
                f"{', '.join((library, *known))}"
            )
    given = {key: value for key, value in values.items() if key != library}
    settings = EnvironmentSettings(
        library=library, name=_absolute(library, name_of, path), values=given, where=where
    )
    return settings, cast(MakeRows, module.rows)


def _absolute(library: str, name: str, path: Path | str) -> str:
    """Returns a name in which the user's own code or folder is relative to no place."""
    base = Path(path).parent if Path(path).suffix in _YAML else Path()
    file, _, attribute = name.rpartition(":")
    if file.endswith(".py"):
        return f"{(base / Path(file).expanduser()).resolve()}:{attribute}"
    if library == "harbor" and (folder := base / Path(name).expanduser()).is_dir():
        return str(folder.resolve())
    return name
