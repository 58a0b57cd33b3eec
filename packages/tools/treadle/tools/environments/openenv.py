"""Environments that OpenEnv serves, over its WebSocket protocol (extra `openenv`).

    openenv: http://127.0.0.1:8000
    action: {message: "{text}"}          # what a turn of the model becomes
    observation: echoed_message          # what the model is shown of an observation
    command: [python, -m, my_server]     # optional: started for the run, and ended with it
    max_sessions: 16

In `action`, {text} is the model's text. Without `observation`, the model is shown the only string
of an observation, or all of it as JSON. The reward is the sum of the steps' rewards. A reset gets
the seed of its row and `arguments`.

The loop keeps nothing open between tasks: each has a session at the server. `command` is started
once per process, before the first task.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from treadle.agent_loop import AgentTask, LoopError, Services, Trajectory
from treadle.tools.arguments import require_extra
from treadle.tools.environments.server_process import ServerProcess
from treadle.tools.environments.settings import (
    COMMON,
    EnvironmentSettings,
    seed_of,
    seeded_rows,
    settings_of,
)
from treadle.tools.environments.text_game import Step, play

KEYS: Final = (*COMMON, "action", "command", "max_sessions", "observation")
"""The keys of its YAML file, besides the library's."""

_LIBRARY: Final = "openenv"
_LOOP: Final = f"{__name__}:OpenEnvLoop"
_SESSIONS: Final = 16
_TEXT: Final = "{text}"
_CLIENT: Final = "openenv.core.generic_client"


def rows(settings: EnvironmentSettings) -> Iterator[Mapping[str, object]]:
    """Yields the rows of an environment, one per seed; the server need not run yet.

    Raises:
        SetupError: OpenEnv is not installed, or a setting is wrong.
    """
    require_extra(settings.where, "openenv", "openenv")
    _action(settings, "")
    settings.text("observation")
    settings.texts("command")
    settings.count("max_sessions", _SESSIONS)
    yield from seeded_rows(settings, _LOOP)


class OpenEnvLoop:
    """Plays one episode per task, in a separate session of the environment's server."""

    scores_itself = True

    def __init__(self) -> None:
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._servers: dict[str, ServerProcess] = {}

    async def __aenter__(self) -> Self:
        # Here, and on a thread, because it takes seconds.
        await asyncio.to_thread(importlib.import_module, _CLIENT)
        return self

    async def __aexit__(self, *error: object) -> None:
        servers, self._servers = self._servers, {}
        self._slots.clear()
        for server in servers.values():
            await server.aclose()

    async def run(self, task: AgentTask, services: Services) -> Trajectory:
        """Attempts the task once.

        Raises:
            RolloutError: The attempt failed.
            SetupError: The server cannot be started.
        """
        settings, extra = settings_of(task, _LIBRARY)
        limit = settings.count("max_sessions", _SESSIONS)
        async with self._slots.setdefault(settings.name, asyncio.Semaphore(limit)):
            if command := settings.texts("command"):
                server = self._servers.setdefault(
                    settings.name, ServerProcess(command, settings.name)
                )
                await server.started()
            return await play(task, services, _Session(settings), seed=seed_of(extra))


class _Session:
    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        client: Any = importlib.import_module(_CLIENT)
        self._client: Any = client.GenericEnvClient(base_url=settings.name)

    async def reset(self, seed: int) -> str:
        await self._client.connect()
        begun = await self._client.reset(seed=seed, **self._settings.mapping("arguments"))
        return _shown(self._settings, begun.observation)

    async def step(self, text: str) -> Step:
        taken = await self._client.step(_action(self._settings, text))
        return Step(
            shown=_shown(self._settings, taken.observation),
            reward=float(taken.reward or 0.0),
            done=bool(taken.done),
        )

    async def aclose(self) -> None:
        await self._client.close()


def _action(settings: EnvironmentSettings, text: str) -> dict[str, object]:
    """Returns the action of a turn.

    Raises:
        SetupError: No value of `action` contains `{text}`.
    """
    given = settings.mapping("action") or {"message": _TEXT}
    if not any(isinstance(value, str) and _TEXT in value for value in given.values()):
        raise settings.wrong("action", f"a mapping in which one value has {_TEXT}")
    return {
        key: value.replace(_TEXT, text) if isinstance(value, str) else value
        for key, value in given.items()
    }


def _shown(settings: EnvironmentSettings, observation: Mapping[str, Any]) -> str:
    """Returns the part of an observation that the model is shown.

    Raises:
        LoopError: It has no field `observation`.
    """
    key = settings.text("observation")
    if key is None:
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)
    if key not in observation:
        raise LoopError(
            f"{settings.where}: an observation has no {key!r}; it has "
            f"{', '.join(observation) or 'nothing'}: set observation to one of these"
        )
    value = observation[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
