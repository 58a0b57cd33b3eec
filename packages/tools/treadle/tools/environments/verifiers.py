"""Environments of verifiers: any installed taskset by name, its rubric as the reward.

    verifiers: gsm8k-v1
    rows: 1000                           # the first ones; all by default
    skip: 0                              # before them
    arguments: {split: train}            # settings of the taskset
    harness: {id: bash}                  # a program of verifiers' that acts for the model

The reward is the sum that the environment's trace has. The taskset's rows are the run's; the model
is this run's, over the endpoint that records tokens (`treadle.agent_loop.proxy`).

Without `harness`, and without one in the taskset's package, the conversation runs in this process
(`verifiers_chat`); programs of verifiers' run as a process per trajectory. Programs are started on
this machine (verifiers' runtime `subprocess`), without isolation.

Servers that a taskset's tasks share are started once per process, before the first task, and ended
when the loop closes. One task owns them, because verifiers wants them left where they were entered.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self

from treadle.agent_loop import LoopError, SetupError
from treadle.agent_loop.proxy import (
    AgentConstraints,
    AgentCrashedError,
    AgentSampling,
    AgentSession,
    ProxyAgentLoop,
)
from treadle.tools.arguments import require_extra
from treadle.tools.environments.settings import EnvironmentSettings, make_row, settings_of

KEYS: Final = ("arguments", "harness", "rows", "skip")
"""The keys of its YAML file, besides the library's."""

_LIBRARY: Final = "verifiers"
_LOOP: Final = f"{__name__}:VerifiersLoop"
_KEY_VARIABLE: Final = "TREADLE_VERIFIERS_API_KEY"
_UNBOUNDED_ROWS: Final = 256
_CLOSE_S: Final = 30.0


def rows(settings: EnvironmentSettings) -> Iterator[Mapping[str, object]]:
    """Yields the rows of a taskset, in its order.

    Raises:
        SetupError: It is not installed, cannot be loaded, or is for several agents; or a setting
            is wrong.
    """
    require_extra(settings.where, "verifiers", "verifiers")
    environment = _load(settings)
    for task in _tasks(environment, settings):
        yield make_row(
            settings,
            _LOOP,
            prompt=_prompt(task.data, settings),
            extra={"task": task.data.idx, "key": task.key},
        )


class VerifiersLoop(ProxyAgentLoop):
    """Runs one episode of verifiers per task."""

    scores_itself = True

    def __init__(self) -> None:
        self._key = secrets.token_urlsafe(24)
        self._served: dict[str, _Served] = {}
        super().__init__(
            self._attempt,
            api_key=self._key,
            sampling=AgentSampling.RUN,
            constraints=AgentConstraints.IGNORE,
        )

    async def __aenter__(self) -> Self:
        os.environ[_KEY_VARIABLE] = self._key  # verifiers takes keys from variables only
        return self

    async def __aexit__(self, *error: object) -> None:
        served, self._served = self._served, {}
        os.environ.pop(_KEY_VARIABLE, None)
        for each in served.values():
            await each.aclose()

    async def _attempt(self, session: AgentSession) -> float:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        settings, extra = settings_of(session.task, _LIBRARY)
        name = json.dumps(settings.plain(), sort_keys=True, default=str)
        served = self._served.get(name)
        if served is None:
            served = self._served[name] = _Served(settings)
        environment = await served.opened()
        context = ModelContext(
            model="policy",
            client=EvalClientConfig(base_url=session.base_url, api_key_var=_KEY_VARIABLE),
        )
        episode = await environment.run_episode(served.task(extra), context)
        return _reward(episode, settings)


def _reward(episode: Any, settings: EnvironmentSettings) -> float:
    """Returns what the environment's rubric gave; of an episode that a limit cut, so far.

    Raises:
        AgentCrashedError: The episode failed.
    """
    failures = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    from treadle.tools.environments.verifiers_chat import LIMIT_CODES

    cut = any(limit in str(failure) for failure in failures for limit in LIMIT_CODES)
    if (failures and not cut) or not episode.traces:
        raise AgentCrashedError(f"{settings.name}: {failures[-1] if failures else 'no trace'}")
    return float(sum(trace.reward for trace in episode.traces))


class _Served:
    """An environment with the servers that its tasks share."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._tasks: dict[int, Any] = {}
        self._closing = asyncio.Event()
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(), name=f"environment {settings.name}")

    async def opened(self) -> Any:
        """Waits for the servers; returns the environment.

        Raises:
            SetupError: It cannot be served.
        """
        return await asyncio.shield(self._ready)

    def task(self, extra: Mapping[str, object]) -> Any:
        """Returns the task of a row.

        Raises:
            LoopError: The taskset has another one in its place since the rows were made.
        """
        found = self._tasks.get(int(str(extra["task"])))
        if found is None or found.key != extra["key"]:
            raise LoopError(
                f"{self._settings.where}: task {extra['task']} is not the one of the row: the "
                "taskset does not give the same tasks each time"
            )
        return found

    async def aclose(self) -> None:
        """Ends the servers."""
        self._closing.set()
        if not self._ready.done():
            self._life.cancel()
        await asyncio.wait([self._life], timeout=_CLOSE_S)

    async def _live(self) -> None:
        try:
            environment = await asyncio.to_thread(_load, self._settings)
            tasks = await asyncio.to_thread(lambda: [*_tasks(environment, self._settings)])
            self._tasks = {task.data.idx: task for task in tasks}
            async with environment.shared_tools() as shared:
                # Not `serving()`: its pool of interception servers keeps a client for each address
                # that it was ever given, and each trajectory has one. Without it, a trajectory has
                # a server that ends with it.
                environment._shared_tools = shared
                try:
                    await environment.start()
                    self._ready.set_result(environment)
                    await self._closing.wait()
                finally:
                    await environment.stop()
        except Exception as error:  # the environment's
            if self._ready.done():
                raise
            failure = error if isinstance(error, SetupError) else _cannot(self._settings, error)
            self._ready.set_exception(failure)


def _load(settings: EnvironmentSettings) -> Any:
    """Returns the environment, with nothing started.

    Raises:
        SetupError: It cannot be loaded, or is for several agents.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        load_environment,
        resolve_env_config,
    )

    from treadle.tools.environments.verifiers_chat import HARNESS_ID

    agent: dict[str, object] = {"runtime": {"type": "subprocess"}}
    if harness := settings.mapping("harness"):
        agent["harness"] = dict(harness)
    elif default_harness_id(settings.name) == "bash":  # the taskset has none
        agent["harness"] = {"id": HARNESS_ID}
    taskset = {"id": settings.name, **settings.mapping("arguments")}
    try:
        environment = load_environment(resolve_env_config({"taskset": taskset, "agent": agent}))
    except Exception as error:  # a taskset is anybody's code
        raise _cannot(settings, error) from error
    if len(agents := agent_config_fields(environment.config)) > 1:
        raise SetupError(
            f"{settings.where}: the environment has the agents {', '.join(agents)}; those of one "
            "agent can be trained"
        )
    return environment


def _tasks(environment: Any, settings: EnvironmentSettings) -> Iterator[Any]:
    taskset = environment.taskset.skip(settings.count("skip", 0, at_least=0))
    if "rows" in settings.values or not environment.taskset.bounded:
        taskset = taskset.take(settings.count("rows", _UNBOUNDED_ROWS))
    try:
        yield from taskset
    except Exception as error:  # a taskset is anybody's code
        raise _cannot(settings, error) from error


def _cannot(settings: EnvironmentSettings, error: Exception) -> SetupError:
    return SetupError(
        f"{settings.where}: the environment cannot be loaded: {type(error).__name__}: {error}"
    )


def _prompt(data: Any, settings: EnvironmentSettings) -> list[dict[str, str]]:
    """Returns a task's first messages, which the row shows and whose length is checked.

    Raises:
        SetupError: The task has none.
    """
    if data.prompt is None:
        raise SetupError(
            f"{settings.where}: task {data.idx} has no prompt: its environment's user begins, and "
            "such environments cannot be trained yet"
        )
    from verifiers.v1.types import content_text

    messages = [] if data.system_prompt is None else [("system", data.system_prompt)]
    if isinstance(data.prompt, str):
        messages.append(("user", data.prompt))
    else:
        messages += [(message.role, content_text(message.content)) for message in data.prompt]
    return [{"role": role, "content": content} for role, content in messages]
