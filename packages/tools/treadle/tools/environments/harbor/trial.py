"""`python -m treadle.tools.environments.harbor.trial`: runs Harbor, where it is installed.

    list                       settings on standard input -> the tasks as JSON
    score FOLDER --agent NAME  the reward of each task, with an agent that needs no model: oracle
                               shows that a task can be solved, nop that doing nothing does not

The exit code is 0, or 1 with the reason as the last line of standard error. The main task waits for
one trial after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from treadle.agent_loop import SetupError
from treadle.tools.environments.harbor.image import (
    UnsupportedTaskError,
    check_script,
    read_image,
)
from treadle.tools.sandbox.limits import SandboxLimits
from treadle.tools.sandbox.room import ROOM_LIMITS

_ENVIRONMENT: Final = "treadle.tools.environments.harbor.environment:SandboxEnvironment"
_AGENT: Final = {"name": "terminus-2"}
_MODEL: Final = "openai/policy"
_ADDRESSES: Final = tuple(
    f"{maker}_{name}" for maker in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY")
)
EXPECTED: Final = (ImportError, OSError, RuntimeError, SetupError, TypeError, ValueError)
"""Errors that end a trial with their message alone, without a traceback."""
_LIMIT_CODES: Final = ("context_length_exceeded", "turn_limit_reached")


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list")
    score = verbs.add_parser("score")
    score.add_argument("folder")
    score.add_argument("--agent", default="oracle")
    score.add_argument("--network", choices=("none", "host"), default="none")
    arguments = parser.parse_args()
    try:
        _list_or_score(arguments)
    except EXPECTED as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        return 1
    return 0


def _list_or_score(arguments: argparse.Namespace) -> None:
    if arguments.verb == "list":
        sys.stdout.write(json.dumps(_list(json.load(sys.stdin))))
        return
    settings = {"agent": {"name": arguments.agent}, "network": arguments.network}
    for path in _tasks(Path(arguments.folder)):
        with tempfile.TemporaryDirectory(prefix="treadle-harbor-") as folder:
            reward = asyncio.run(run_trial(path, settings, Path(folder)))
        sys.stdout.write(f"{path.name} {reward:g}\n")
        sys.stdout.flush()


def _tasks(folder: Path) -> list[Path]:
    if (folder / "task.toml").exists():
        return [folder.resolve()]
    found = sorted(path.parent.resolve() for path in folder.glob("*/task.toml"))
    if not found:
        raise ValueError(f"{folder} has no task: neither it nor a folder in it has a task.toml")
    return found


def _list(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    _limits(settings)
    listed = []
    for path in _tasks(Path(settings["harbor"])):
        problem = instruction = ""
        try:
            instruction = _instruction(path, settings)
        except (OSError, ValueError) as error:
            problem = f"task {path.name}: {error}"
        listed.append({"path": str(path), "instruction": instruction, "problem": problem})
    return listed


def _instruction(path: Path, settings: Mapping[str, Any]) -> str:
    """Returns the instruction of a task that can run here.

    Raises:
        UnsupportedTaskError: It cannot.
        ValueError: It is not in Harbor's format.
    """
    from harbor.models.task.task import Task

    task = Task(path)
    config = task.config
    network = settings.get("network") == "host"
    images = settings.get("images") or ()
    docker_image = config.environment.docker_image
    read_image(task.paths.environment_dir, docker_image, images=images, network=network)
    for who, user in (("agent", config.agent.user), ("verifier", config.verifier.user)):
        if user not in (None, "root", "0", 0):
            raise UnsupportedTaskError(f"its {who} is user {user!r}, and the sandbox has root only")
    if config.environment.gpus or config.environment.tpu:
        raise UnsupportedTaskError("it needs an accelerator")
    if config.environment.network_mode == "allowlist":
        raise UnsupportedTaskError("it allows some hosts only, which the sandbox cannot hold to")
    if not network:
        given = tomllib.loads(task.paths.config_path.read_text()).get("environment", {})
        if given.get("network_mode", "no-network") != "no-network" or given.get("allow_internet"):
            raise UnsupportedTaskError("its task.toml asks for a network: set `network: host`")
        for script in sorted(path.glob("**/test.sh")):
            check_script(str(script.relative_to(path)), script.read_text())
    steps = config.steps or []
    return str(task.step_instruction(steps[0].name) if steps else task.instruction)


async def run_trial(path: Path, settings: Mapping[str, Any], folder: Path) -> float:
    """Runs one trial; returns its reward.

    Args:
        folder: Directory for Harbor's files, unless the settings name one as `trials`.

    Raises:
        RuntimeError: The trial has no reward, or lacks the one that the settings name.
    """
    from harbor.models.trial.config import (
        AgentConfig,
        EnvironmentConfig,
        TaskConfig,
        TrialConfig,
    )
    from harbor.trial.trial import Trial

    given = {key: value for key, value in os.environ.items() if key in _ADDRESSES}
    agent = {**(settings.get("agent") or _AGENT)}
    agent["env"] = {**given, **agent.get("env", {})}
    environment = {
        "network": settings.get("network") or "none",
        "images": tuple(settings.get("images") or ()),
        "limits": _limits(settings),
    }
    trial = await Trial.create(
        TrialConfig(
            task=TaskConfig(path=path),
            trials_dir=Path(settings.get("trials") or folder),
            agent=AgentConfig(**{"model_name": _MODEL, **agent}),
            environment=EnvironmentConfig(import_path=_ENVIRONMENT, kwargs=environment),
        )
    )
    result = await trial.run()
    rewards = result.verifier_result.rewards if result.verifier_result else None
    if rewards:
        return _reward(rewards, settings.get("reward"))
    problem = result.exception_info
    words = f"{problem.exception_type}: {problem.exception_message}" if problem else "no reward"
    if any(code in words for code in _LIMIT_CODES):
        return 0.0  # a limit of the run ended the agent, and nothing was graded
    raise RuntimeError(f"the trial of task {path.name} failed: {words}")


def _limits(settings: Mapping[str, Any]) -> SandboxLimits:
    return SandboxLimits(**{**asdict(ROOM_LIMITS), **(settings.get("limits") or {})})


def _reward(rewards: Mapping[str, float], key: str | None) -> float:
    if key is None:
        key = "reward" if "reward" in rewards or len(rewards) > 1 else next(iter(rewards))
    if key not in rewards:
        raise RuntimeError(
            f"the verifier's rewards are {', '.join(rewards)}: set `reward` to one of them"
        )
    return float(rewards[key])


if __name__ == "__main__":
    sys.exit(main())
