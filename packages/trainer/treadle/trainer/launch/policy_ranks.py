"""Starts the ranks of a run's policy, each as a process of the run's launcher."""

import shlex
from collections.abc import Sequence

from treadle.policy.client.process import RankProcess, RankProgram, StartRank
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.config.topology import Devices
from treadle.trainer.launch.environment import thread_variables
from treadle.trainer.launch.own_environment import ask_command, check_command
from treadle.trainer.launch.process import Launcher, ProcessSpec

__all__ = ["ask_rank_command", "rank_starter"]

_COMMAND = "policy.command"


def ask_rank_command(config: AnyConfig) -> str | None:
    """Runs the ranks' command with `--version`; returns one line about its answer.

    Returns:
        None where there is no command, or where it is for the nodes of a cluster.

    Raises:
        ConfigError: The program is not on this machine, does not run, or cannot be a rank.
    """
    command = config.policy.command
    if not command or config.launch.kind != "local":
        return None
    check_command(_COMMAND, command)
    answer = ask_command(_COMMAND, command, "--version", config.policy.backend)
    return f"{shlex.join(command)}: {answer.strip()}"


def rank_starter(
    launcher: Launcher, *, threads: int, gpus: float = 0.0, devices: Sequence[Devices] = ()
) -> StartRank:
    """Returns how a policy group starts its ranks.

    Args:
        threads: Number of CPU threads of each rank.
        gpus: Number of GPUs that Ray reserves for each, where `devices` is empty.
        devices: GPUs of each rank, by its number; empty: they are not assigned.
    """

    async def start(program: RankProgram) -> RankProcess:
        return await launcher.start(
            ProcessSpec(
                name=f"policy-{program.number}",
                module="treadle.policy.rank",
                command=program.command,
                args=program.args,
                env={**program.env, **thread_variables(threads)},
                devices=devices[program.number] if devices else None,
                gpus=gpus,
            )
        )

    return start
