"""Makes the policy of a run. Apart from the starter of its ranks: it loads gRPC."""

from pathlib import Path

from treadle.policy.client.group import PolicyGroup
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.config.topology import make_topology
from treadle.trainer.launch.policy_ranks import rank_starter
from treadle.trainer.launch.process import Launcher

__all__ = ["policy_group"]


def policy_group(
    config: AnyConfig, launcher: Launcher, *, threads: int, profiles: Path | None = None
) -> PolicyGroup:
    """Returns the policy of a run, which is not started yet.

    Args:
        config: With a model that is on this machine.
        threads: Number of CPU threads of each rank.
        profiles: Directory of the ranks' profiles, unless the settings have another; None: there is
            no run, and nothing is profiled.
    """
    policy = config.policy
    if policy.profile.first_step is not None:
        found = None if profiles is None else policy.profile.directory or profiles.resolve()
        first = None if found is None else policy.profile.first_step
        profile = policy.profile.model_copy(update={"directory": found, "first_step": first})
        policy = policy.model_copy(update={"profile": profile})
    rl = config if isinstance(config, Config) else None  # None: fine-tuning
    topology = make_topology(config.launch, config.policy, None if rl is None else rl.rollout)
    gpus = getattr(config.launch, "gpus_per_policy_rank", 0.0)
    devices = () if topology is None else topology.ranks
    return PolicyGroup(
        rank_starter(launcher, threads=threads, gpus=gpus, devices=devices),
        policy,
        config.model.path,
        with_reference=rl is not None and rl.algorithm.keeps_reference,
        reference_path=None if rl is None else rl.algorithm.reference_path,
        own_devices=bool(gpus or devices),
        start_deadline_s=config.launch.start_deadline_s,
        critic=None if rl is None else rl.used_critic,
        tls=None if launcher.tls is None else launcher.tls.directory,
    )
