"""Starts the ranks of a run's policy, each as a process of the run's launcher."""

from collections.abc import Sequence

from treadle.policy.client.process import RankProcess, RankProgram, StartRank
from treadle.trainer.config.topology import Devices
from treadle.trainer.launch.environment import thread_variables
from treadle.trainer.launch.process import Launcher, ProcessSpec

__all__ = ["rank_starter"]


def rank_starter(
    launcher: Launcher, *, threads: int, gpus: float = 0.0, devices: Sequence[Devices] = ()
) -> StartRank:
    """Returns how a policy group starts its ranks.

    Args:
        launcher: Starts the processes.
        threads: Number of CPU threads of each rank.
        gpus: Number of GPUs that Ray reserves for each, where `devices` is empty.
        devices: GPUs of each rank, by its number; empty: they are not assigned.
    """

    async def start(program: RankProgram) -> RankProcess:
        return await launcher.start(
            ProcessSpec(
                name=f"policy-{program.number}",
                module="treadle.policy.rank",
                args=program.args,
                env={**program.env, **thread_variables(threads)},
                devices=devices[program.number] if devices else None,
                gpus=gpus,
            )
        )

    return start
