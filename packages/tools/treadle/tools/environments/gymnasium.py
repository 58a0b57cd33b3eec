"""Text environments with Gymnasium's interface, registered ones or the user's own class.

    gymnasium: FrozenLake-v1             # or my_games.py:Guess, package.module:Guess
    arguments: {render_mode: ansi}
    actions: [left, down, right, up]

An environment has `reset(seed=...)`, which returns (observation, info), and `step(action)`, which
returns (observation, reward, terminated, truncated, info). A text observation is shown as it is;
one of another type only with render_mode "ansi", where `render()` is shown. The action is the
model's text, or with `actions` the number of the last of these words in it.

The reward is the sum of the steps' rewards. Steps run on threads, beside the event loop. A class of
the user's own needs no library (extra `gymnasium` installs it for registered names).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from treadle.agent_loop import AgentTask, Services, SetupError, Trajectory, load_import_path
from treadle.agent_loop.user_calls import call_user
from treadle.tools.arguments import require_extra
from treadle.tools.environments.settings import (
    COMMON,
    EnvironmentSettings,
    seed_of,
    seeded_rows,
    settings_of,
)
from treadle.tools.environments.text_game import Step, play

KEYS: Final = (*COMMON, "actions")
"""The keys of its YAML file, besides the library's."""

_LIBRARY: Final = "gymnasium"
_LOOP: Final = f"{__name__}:GymnasiumLoop"


class GymnasiumEnvironment(Protocol):
    """The part of `gymnasium.Env` that is used."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, Mapping[str, Any]]:
        """Begins an episode; returns observation and info."""
        ...

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        """Returns observation, reward, terminated, truncated and info."""
        ...


def rows(settings: EnvironmentSettings) -> Iterator[Mapping[str, object]]:
    """Yields the rows of an environment, one per seed.

    Raises:
        SetupError: It cannot be made or reset, or does not speak in text, or a setting is wrong.
    """
    seed = settings.count("first_seed", 0, at_least=0)
    settings.texts("actions")
    if ":" not in settings.name:
        require_extra(settings.where, "gymnasium", "gymnasium")
    try:
        game = _Game(settings)
        try:
            game.show(game.environment.reset(seed=seed)[0])
        finally:
            game.close()
    except SetupError:
        raise
    except Exception as error:  # the user's, or that of an installed package
        raise SetupError(
            f"{settings.where}: the environment cannot begin: {type(error).__name__}: {error}"
        ) from error
    yield from seeded_rows(settings, _LOOP)


class GymnasiumLoop:
    """Plays one episode per task; each has its own environment."""

    scores_itself = True

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
        """
        settings, extra = settings_of(task, _LIBRARY)
        return await play(task, services, _Game(settings), seed=seed_of(extra))


class _Game:
    def __init__(self, settings: EnvironmentSettings) -> None:
        self._actions = settings.texts("actions")
        self._where = settings.where
        self.environment = _make(settings)

    async def reset(self, seed: int) -> str:
        begun = await call_user("the environment", partial(self.environment.reset, seed=seed))
        return self.show(cast(tuple[object, object], begun)[0])

    async def step(self, text: str) -> Step:
        action: object = text
        if self._actions:
            chosen = _last_word(text, self._actions)
            if chosen is None:
                return Step(shown=f"Answer with one of: {', '.join(self._actions)}.")
            action = chosen
        taken = await call_user("the environment", partial(self.environment.step, action))
        shown, reward, terminated, truncated, _ = cast(tuple[Any, ...], taken)
        return Step(shown=self.show(shown), reward=float(reward), done=terminated or truncated)

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()

    def show(self, observation: object) -> str:
        if isinstance(observation, str):
            return observation
        if getattr(self.environment, "render_mode", None) == "ansi":
            return str(cast(Any, self.environment).render())
        raise TypeError(
            f"{self._where}: an observation is {observation!r:.80}; a text environment's is a "
            "string, or arguments has render_mode: ansi if the environment can draw itself in text"
        )


def _make(settings: EnvironmentSettings) -> GymnasiumEnvironment:
    arguments = settings.mapping("arguments")
    if ":" in settings.name:
        make = cast(
            Callable[..., GymnasiumEnvironment], load_import_path(settings.name, "environment")
        )
        return make(**arguments)
    import gymnasium

    return cast(GymnasiumEnvironment, gymnasium.make(settings.name, **arguments))


def _last_word(text: str, words: Sequence[str]) -> int | None:
    """Returns the number of the word that stands last in a text, whatever its case."""
    pattern = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    found = re.findall(rf"(?<!\w)({pattern})(?!\w)", text, re.IGNORECASE)
    if not found:
        return None
    return [word.lower() for word in words].index(found[-1].lower())
