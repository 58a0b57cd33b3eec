"""Starts the ranks of a run's policy, each as a process of the run's launcher."""

import shlex
from collections.abc import Sequence

from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.process import RankProcess, RankProgram, StartRank
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.config.topology import Devices, make_topology
from treadle.trainer.launch.environment import thread_variables
from treadle.trainer.launch.own_environment import ask_command, check_command
from treadle.trainer.launch.process import Launcher, ProcessSpec

__all__ = ["ask_rank_command", "policy_group", "rank_starter"]

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


def policy_group(config: AnyConfig, launcher: Launcher, *, threads: int) -> PolicyGroup:
    """Returns the policy of a run, which is not started yet.

    Args:
        config: With a model that is on this machine.
        threads: Number of CPU threads of each rank.
    """
    training = config if isinstance(config, Config) else None
    topology = make_topology(config.launch, config.policy, training and training.rollout)
    gpus = getattr(config.launch, "gpus_per_policy_rank", 0.0)
    devices = () if topology is None else topology.ranks
    return PolicyGroup(
        rank_starter(launcher, threads=threads, gpus=gpus, devices=devices),
        config.policy,
        config.model.path,
        with_reference=training is not None and training.algorithm.keeps_reference,
        reference_path=training and training.algorithm.reference_path,
        own_devices=bool(gpus or devices),
        start_deadline_s=config.launch.start_deadline_s,
        critic=training and training.used_critic,
        tls=None if launcher.tls is None else launcher.tls.directory,
    )
