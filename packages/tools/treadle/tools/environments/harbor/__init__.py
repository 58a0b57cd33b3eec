"""Tasks in Harbor's format: an agent of Harbor's acts in a sandbox, its verifier gives the reward.

    harbor: tasks/                       # a folder of tasks, or one task
    agent: {name: terminus-2, kwargs: {record_terminal_session: false}}
    python: /venvs/harbor/bin/python     # where Harbor is installed; by default beside Treadle
    rows: 100                            # the first ones; all by default
    skip: 0                              # before them
    network: none                        # or host: the host's network, for the agent's programs too
    images: [my/image]                   # images that this machine's system stands for
    limits: {memory_mib: 4096}           # of the sandbox (`SandboxLimits`)
    unsupported: refuse                  # or skip: leave out tasks that cannot run here
    reward: tests_passed                 # a key of reward.json, if none is "reward"
    trials: harbor_trials/               # keeps what Harbor writes; by default it is deleted

Harbor is imported by no process of the run: a trial is a process of the interpreter that has
Harbor (`trial`), forked for one trajectory and ended with it. Its agent gets the endpoint that
records tokens (`treadle.agent_loop.proxy`) as OPENAI_BASE_URL, and its environment is a room of our
sandbox (`environment`), so that no container is needed.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from treadle.agent_loop import SetupError
from treadle.agent_loop.proxy import (
    AgentConstraints,
    AgentSampling,
    AgentSession,
    ProxyAgentLoop,
)
from treadle.tools.arguments import require_extra
from treadle.tools.environments.harbor.trials import HarborTrials
from treadle.tools.environments.settings import EnvironmentSettings, make_row, settings_of
from treadle.tracing.child_process import supervised

KEYS: Final = (
    *("agent", "images", "limits", "network", "python", "reward", "rows", "skip", "trials"),
    "unsupported",
)
"""The keys of its YAML file, besides the library's."""

_LIBRARY: Final = "harbor"
_LOOP: Final = f"{__name__}:HarborLoop"
_CHOICES: Final = {"network": ("none", "host"), "unsupported": ("refuse", "skip")}
_SHOWN: Final = 3
_log = logging.getLogger(__name__)


def rows(settings: EnvironmentSettings) -> Iterator[Mapping[str, object]]:
    """Yields one row per task, in the order of their names.

    Raises:
        SetupError: Harbor is not installed, there is no such folder, a task cannot run in the
            sandbox, or a setting is wrong.
    """
    _check(settings)
    folder = Path(settings.name)
    if not folder.is_dir():
        raise SetupError(
            f"{settings.where}: there is no folder {settings.name}. A data set of Harbor's "
            "registry must be downloaded first, which needs the network: harbor download "
            f"{settings.name} -o FOLDER"
        )
    tasks = _list(settings)
    begin = settings.count("skip", 0, at_least=0)
    end = begin + settings.count("rows", len(tasks) or 1)
    problems = [problem for task in tasks[begin:end] if (problem := task["problem"])]
    if problems and settings.values.get("unsupported") != "skip":
        more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
        raise SetupError(
            f"{settings.where}: {'; '.join(problems[:_SHOWN])}{more}; `unsupported: skip` leaves "
            "such tasks out"
        )
    for problem in problems:
        _log.warning("%s: left out: %s", settings.where, problem)
    usable = [task for task in tasks[begin:end] if not task["problem"]]
    if not usable:
        raise SetupError(f"{settings.where}: no task of {folder} can be used")
    for task in usable:
        prompt = [{"role": "user", "content": task["instruction"]}]
        yield make_row(settings, _LOOP, prompt=prompt, extra={"task": task["path"]})


class HarborLoop(ProxyAgentLoop):
    """Runs one trial of Harbor's per task."""

    scores_itself = True

    def __init__(self) -> None:
        self._trials: dict[str, HarborTrials] = {}
        super().__init__(
            self._attempt, sampling=AgentSampling.RUN, constraints=AgentConstraints.IGNORE
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        trials, self._trials = self._trials, {}
        for each in trials.values():
            await each.aclose()

    async def _attempt(self, session: AgentSession) -> float:
        settings, extra = settings_of(session.task, _LIBRARY)
        command = _command(settings, "server")
        trials = self._trials.setdefault(command[0], HarborTrials(command))
        addresses = {
            **session.environment,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
            "NO_PROXY": "*",  # the endpoint is on this machine
        }
        with tempfile.TemporaryDirectory(prefix="treadle-harbor-") as folder:
            path = str(extra["task"])
            return await trials.run(path, settings.plain(), addresses, Path(folder))


def _command(settings: EnvironmentSettings, *program: str) -> list[str]:
    return [
        settings.text("python") or sys.executable,
        "-m",
        f"{__name__}.{program[0]}",
        *program[1:],
    ]


def _check(settings: EnvironmentSettings) -> None:
    if settings.text("python") is None:
        require_extra(settings.where, "harbor", "harbor")
    for key in ("agent", "limits"):
        settings.mapping(key)
    for key in ("reward", "trials"):
        settings.text(key)
    settings.texts("images")
    for key, choices in _CHOICES.items():
        if settings.values.get(key, choices[0]) not in choices:
            raise settings.wrong(key, f"one of {', '.join(choices)}")


def _list(settings: EnvironmentSettings) -> list[dict[str, str]]:
    """Returns the tasks as the interpreter that has Harbor reads them.

    Raises:
        SetupError: It is none, lacks Harbor, or refuses the settings.
    """
    command = _command(settings, "trial", "list")
    try:
        done = subprocess.run(
            supervised(command),
            input=json.dumps(settings.plain()),
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise SetupError(f"{settings.where}: {command[0]!r} does not start: {error}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise SetupError(
            f"{settings.where}: the tasks cannot be read by {command[0]}, which needs "
            f"treadle-tools[harbor]: {last[0]}"
        )
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found
