"""Commands that start a process in an environment of its own: a rollout server, a policy rank."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence

from treadle.tracing.child_process import supervised
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.launch.environment import foreign_environment

__all__ = ["ask_command", "check_command"]

_ANSWER_DEADLINE_S = 120.0


def check_command(key: str, command: Sequence[str]) -> None:
    """Checks that the program is on this machine.

    Args:
        key: The setting that holds the command, for the message.

    Raises:
        ConfigError: It is not.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"{key}={list(command)}: there is no program {command[0]!r} on this machine"
        )


def ask_command(key: str, command: Sequence[str], *options: str) -> str:
    """Runs the command with these options; returns what it prints.

    Raises:
        ConfigError: It does not run, or fails.
    """
    shown = shlex.join((*command, *options))
    environment = foreign_environment(command[0], {})
    try:
        answer = subprocess.run(
            supervised((*command, *options), environment=environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_DEADLINE_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key}: `{shown}` does not run: {error}") from None
    if answer.returncode:
        said = "\n".join((answer.stdout + answer.stderr).splitlines()[-10:])
        raise ConfigError(f"{key}: `{shown}` exited with status {answer.returncode}:\n{said}")
    return answer.stdout
