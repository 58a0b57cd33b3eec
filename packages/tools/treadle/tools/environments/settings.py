"""The settings of an environment: the checked contents of its YAML file.

Invariant: every key is one that the environment's library takes and has a value of its type, or a
`SetupError` names the place, the value and the known keys. A row carries the settings of its
environment as plain data, so that its loop needs no configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from treadle.agent_loop import AgentTask, SetupError

COMMON: Final = ("rows", "first_seed", "instructions", "arguments")
"""Keys of every environment without a data set."""
_COLUMN: Final = "environment"
_ROWS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSettings:
    """The settings of an environment, from a YAML file or from a name alone.

    Attributes:
        library: Its key in the file, such as "textarena".
        name: The environment's name in its library.
        where: Names the file, or the name, in errors.
    """

    library: str
    name: str
    values: Mapping[str, object]
    where: str

    def text(self, key: str) -> str | None:
        """Returns a string, None if it is absent.

        Raises:
            SetupError: It is something else.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def count(self, key: str, default: int, *, at_least: int = 1) -> int:
        """Returns a whole number.

        Raises:
            SetupError: It is something else, or too small.
        """
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.wrong(key, f"a whole number of at least {at_least}")
        return value

    def mapping(self, key: str) -> Mapping[str, object]:
        """Returns a mapping, empty if it is absent.

        Raises:
            SetupError: It is something else.
        """
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.wrong(key, "a mapping with strings as keys")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Returns a list of strings, empty if it is absent.

        Raises:
            SetupError: It is something else.
        """
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of strings")
        return tuple(value)

    def wrong(self, key: str, expected: str) -> SetupError:
        """Returns the error of a value that cannot be used."""
        return SetupError(
            f"{self.where}: {key} must be {expected}, got {self.values.get(key)!r:.80}"
        )

    def plain(self) -> dict[str, object]:
        """Returns the settings as a column of a row; `settings_of` reads it."""
        return {self.library: self.name, **self.values}


def seeded_rows(settings: EnvironmentSettings, loop: str) -> Iterator[Mapping[str, object]]:
    """Yields one row per seed, for environments that draw their tasks from a seed.

    Args:
        settings: Their `rows`, `first_seed` and `instructions` are read.
        loop: The agent loop of the rows, as "module:Class".

    Raises:
        SetupError: A value cannot be used.
    """
    first = settings.count("first_seed", 0, at_least=0)
    instructions = settings.text("instructions")
    begin = [] if instructions is None else [{"role": "system", "content": instructions}]
    for seed in range(first, first + settings.count("rows", _ROWS)):
        # What the environment says first is known when it has been reset.
        shown = {"role": "user", "content": f"{settings.name}, seed {seed}"}
        yield make_row(settings, loop, prompt=[*begin, shown], extra={"seed": seed})


def make_row(
    settings: EnvironmentSettings,
    loop: str,
    *,
    prompt: list[dict[str, str]],
    extra: Mapping[str, object],
) -> dict[str, object]:
    """Returns a row of an environment.

    Args:
        settings: Go into `extra_info`, for the loop.
        loop: The agent loop of the row, as "module:Class".
    """
    return {
        "data_source": f"{settings.library}/{settings.name}",
        "prompt": prompt,
        "reward_model": {},
        "agent_name": loop,
        "extra_info": {_COLUMN: settings.plain(), **extra},
    }


def settings_of(task: AgentTask, library: str) -> tuple[EnvironmentSettings, Mapping[str, object]]:
    """Returns the settings in a row that `make_row` made, and its `extra_info`.

    Raises:
        SetupError: The row is of something else.
    """
    extra = task.fields.get("extra_info")
    column = extra.get(_COLUMN) if isinstance(extra, Mapping) else None
    if not isinstance(extra, Mapping) or not isinstance(column, Mapping) or library not in column:
        raise SetupError(
            f"task {task.task_id!r} is not a row of an environment of {library}: name the "
            f'environment in data.train_files, as "{library}:NAME" or by a YAML file'
        )
    # A parquet column of structs holds null for what only other rows have.
    values = {k: v for k, v in column.items() if k != library and v is not None}
    name = str(column[library])
    return EnvironmentSettings(
        library=library, name=name, values=values, where=f"{library}:{name}"
    ), extra


def seed_of(extra: Mapping[str, object]) -> int:
    """Returns the seed in a row's `extra_info`.

    Raises:
        SetupError: It has none.
    """
    seed = extra.get("seed")
    if not isinstance(seed, int):
        raise SetupError(f"extra_info.seed is {seed!r}; it must be a whole number")
    return seed
