"""Checks of the processes and steps of a run, beyond the servers' command."""

import importlib.util
import socket

from treadle.agent_loop.loopback import is_loopback
from treadle.policy.algorithms.estimators import find_estimator
from treadle.trainer.config.logger_names import ALWAYS
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.data import DataError, PromptSet
from treadle.trainer.data.order import make_order
from treadle.trainer.loggers.named import check_logger
from treadle.trainer.own_code import OwnCode
from treadle.trainer.problems import Problems

__all__ = [
    "check_addresses",
    "check_estimator",
    "check_launcher",
    "check_loggers",
    "check_network",
    "check_rows_left",
]


def check_estimator(config: Config) -> None:
    """Rejects an advantage estimator that does not exist, or has nothing to compare.

    Dynamic sampling is rejected where groups of equal rewards have advantages, or all groups are
    without signal.

    Raises:
        ConfigError: A row has too few trajectories for it, or it does not go with dynamic sampling.
        SetupError: There is none of this name, or it cannot be loaded.
    """
    estimator, samples = find_estimator(config.algorithm), config.rollout.samples_per_prompt
    if samples < estimator.min_samples:
        raise ConfigError(
            f"algorithm.advantage={estimator.name} compares the trajectories of a row, and "
            f"rollout.samples_per_prompt={samples}: set at least {estimator.min_samples}"
        )
    if estimator.needs_greedy and config.schedule.kind != "sync":
        raise ConfigError(
            f"algorithm.advantage={estimator.name} compares with a greedy trajectory of the same "
            f"weights, and schedule.kind={config.schedule.kind} changes weights while a group is "
            "sampled: set schedule.kind=sync, or another advantage"
        )
    if (by := config.algorithm.dynamic_sampling) is None:
        return
    if not estimator.compares:
        raise ConfigError(
            f"algorithm.dynamic_sampling={by} leaves out rows whose rewards are all equal, and "
            f"algorithm.advantage={estimator.name} learns from them, as it does not compare them: "
            "set algorithm.dynamic_sampling=null, or another advantage"
        )
    if samples < 2:
        raise ConfigError(
            f"algorithm.dynamic_sampling={by} compares the trajectories of a row, and "
            f"rollout.samples_per_prompt={samples}: set at least 2, or "
            "algorithm.dynamic_sampling=null"
        )


def check_launcher(config: AnyConfig) -> None:
    """Rejects a launcher whose library is not installed.

    Raises:
        ConfigError: It is not.
    """
    if config.launch.kind != "ray":
        return
    for module, name in (("ray", "Ray"), ("cryptography", "cryptography")):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"launch.kind=ray needs {name}, which is not installed: "
                'pip install "treadle-trainer[ray]"'
            )


def check_workers(config: Config, own: OwnCode) -> None:
    """Rejects loop workers that could not do what the trainer's own process does.

    Raises:
        ConfigError: A script's objects are in this process only, or the router's library is not
            installed.
    """
    if not (count := config.agent.num_workers):
        return
    given = [
        *(["the reward"] if own.reward is not None else []),
        *(f"the tool {name!r}" for name in own.tools),
        *(f"the agent loop {name!r}" for name in own.loops),
    ]
    if given:
        raise ConfigError(
            f"agent.num_workers={count} runs loops, tools and rewards in other processes, which "
            f"cannot get {', '.join(given)} that train was given: put it into a file and "
            "name it by reward.name, agent.tool_catalogue or agent.loops, or set "
            "agent.num_workers=0"
        )
    if importlib.util.find_spec("grpc_health") is None:
        raise ConfigError(
            f"agent.num_workers={count} needs the routing service, whose library is not installed: "
            'pip install "treadle-agent-loop[router]"'
        )


def check_addresses(config: Config) -> None:
    """Rejects servers of someone else that the weights would not reach.

    Raises:
        ConfigError: The transport is for one host, and a server is on another.
    """
    if config.sync.transport.kind != "shared_memory":
        return
    own = {socket.gethostname(), socket.getfqdn()}
    for address in config.rollout.addresses:
        host = address.rpartition(":")[0]
        if host not in own and not is_loopback(host):
            raise ConfigError(
                f"sync.transport=shared_memory is for servers on this host, {socket.gethostname()},"
                f" and rollout.addresses has {address}: set sync.transport=inline, or collective"
            )


def check_network(config: Config) -> None:
    """Rejects what would travel in plain text between the hosts of a Ray cluster.

    Raises:
        ConfigError: The servers of someone else have no certificate that the run's could go with,
            or weights are to go through a collective group.
    """
    launch, rollout = config.launch, config.rollout
    if launch.kind != "ray" or launch.address is None or launch.allow_plaintext_on_network:
        return
    trusted = "on a trusted network, set launch.allow_plaintext_on_network=true"
    listens = rollout.num_replicas or config.agent.num_workers
    if rollout.addresses and listens and rollout.tls_certificate is None:
        raise ConfigError(
            f"launch.address={launch.address}: the run's servers and router listen on the network, "
            f"and the certificates that it makes are not those of rollout.addresses="
            f"{list(rollout.addresses)}: set rollout.tls_certificate, tls_key, tls_roots and "
            f"token_file for all of them; or {trusted}"
        )
    transport = config.sync.transport
    if transport.kind == "collective" and not transport.allow_plaintext:
        raise ConfigError(
            f"launch.address={launch.address} and sync.transport=collective: NCCL and gloo do not "
            "encrypt the weights between hosts: on a trusted network, set "
            "sync.transport.allow_plaintext=true, or take sync.transport=inline"
        )


def check_loggers(config: AnyConfig, problems: Problems) -> None:
    """Finds each logger whose library is not installed, or whose class cannot be loaded."""
    for name in config.run.loggers:
        if name not in ALWAYS:
            with problems.collected():
                check_logger(name)


def check_rows_left(config: Config, train: PromptSet) -> None:
    """Rejects a run of which fewer rows are left than one step takes.

    Raises:
        DataError: Too many prompts were too long, or `data.weights` do not fit the rows.
    """
    left, needed = len(train.prompts), config.data.prompts_per_step
    if left < needed:
        raise DataError(
            f"data.prompts_per_step={needed} exceeds the {left} training rows that are left: "
            f"{train.notes[0]}. Lower it, or raise rollout.prompt_length"
        )
    data = config.data
    make_order(
        train.prompts,
        data.weights,
        batch_size=data.prompts_per_step,
        seed=config.run.seed,
        shuffle=data.shuffle,
    )
