"""The topology: which GPUs each policy rank and each rollout server has. Pure.

`launch.nodes` and `launch.gpus_per_node` set the number of GPUs; process counts that the user did
not set are derived from them (`derived_settings`). A GPU belongs to at most one policy rank. A
server has one GPU for each part of each of its copies of the model, all on one node. Colocated
servers share the ranks' GPUs; separate servers have the GPUs after those of the ranks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.policy.config.policy import PolicyConfig
from treadle.trainer.config.launch import LocalLaunchConfig, RayLaunchConfig
from treadle.trainer.config.rollout import RolloutConfig

__all__ = ["Devices", "Topology", "derived_settings", "make_topology"]

_MOST_IN_FLIGHT = 1024
"""Completions at a time that one server is given at most, as in verl and vLLM."""
_OFFLOADED = ("parameters", "optimizer", "reference")


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of one node.

    Attributes:
        indices: Indices of the GPUs, among those of the node that the run may use.
    """

    node: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The devices of all processes.

    Attributes:
        gpus_per_node: Number of GPUs of each.
        ranks: One per policy rank, by its number.
        servers: One per rollout server, by its number.
    """

    nodes: int
    gpus_per_node: int
    ranks: tuple[Devices, ...]
    servers: tuple[Devices, ...]


def make_topology(
    launch: LocalLaunchConfig | RayLaunchConfig,
    policy: PolicyConfig,
    rollout: RolloutConfig | None = None,
) -> Topology | None:
    """Returns the topology of a run; None if GPUs are not assigned.

    Args:
        rollout: None: the run has no servers.

    Raises:
        ValueError: The processes need other GPUs than there are.
    """
    ranks = policy.parallel.num_ranks
    per_node, total = launch.gpus_per_node, launch.nodes * launch.gpus_per_node
    if not per_node:
        return None
    there = f"launch.nodes={launch.nodes} x launch.gpus_per_node={per_node}"
    if ranks > total:
        raise ValueError(
            f"{there} are {total} GPUs, and the policy has {ranks} ranks "
            f"({policy.parallel.sizes}): lower policy.parallel.data, or raise the GPUs"
        )
    return Topology(
        nodes=launch.nodes,
        gpus_per_node=per_node,
        ranks=tuple(Devices(rank // per_node, (rank % per_node,)) for rank in range(ranks)),
        servers=() if rollout is None else _servers(launch, rollout, there, ranks, total),
    )


def _servers(
    launch: LocalLaunchConfig | RayLaunchConfig,
    rollout: RolloutConfig,
    there: str,
    ranks: int,
    total: int,
) -> tuple[Devices, ...]:
    per_node = launch.gpus_per_node
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if size > per_node:
        raise ValueError(
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} x "
            f"rollout.data_parallel_size={rollout.data_parallel_size} are {size} GPUs of a server, "
            f"and launch.gpus_per_node={per_node}: a server's GPUs are on one node"
        )
    separate = launch.placement == "separate"
    servers, at = [], ranks if separate else 0
    for _ in range(rollout.num_replicas):
        if at % per_node + size > per_node:  # the rest of this node is too small
            at += per_node - at % per_node
        servers.append(Devices(at // per_node, tuple(range(at % per_node, at % per_node + size))))
        at += size
    if at > total:
        beside = f" after the policy's {ranks}" if separate else ""
        raise ValueError(
            f"{there} are {total} GPUs, and rollout.num_replicas={rollout.num_replicas} servers of "
            f"{size} need GPUs up to number {at}{beside}: lower one of them"
        )
    return tuple(servers)


def derived_settings(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that follow from the GPUs, without those that are given.

    Args:
        given: The user's settings, by key; a value of a wrong type is left to the validation.
        defaults: One for every key of the tree.

    Raises:
        ValueError: The GPUs do not divide into the processes' shares.
    """
    values = {**defaults, **given}
    per_node, nodes = (_count(values, f"launch.{name}") for name in ("gpus_per_node", "nodes"))
    if not per_node or not nodes:
        return {}
    derived: dict[str, Any] = {"policy.dtype": "bfloat16"}
    if nodes > 1 and given.get("launch.kind") != "local":
        derived |= {"launch.kind": "ray", "launch.address": "auto"}
    rank = math.prod(
        _count(values, f"policy.parallel.{name}") for name in ("tensor", "pipeline", "context")
    )
    total = per_node * nodes
    if "rollout.num_replicas" not in defaults:  # fine-tuning
        derived["policy.parallel.data"] = _share(total, rank, given, "policy.parallel.data")
    else:
        derived |= _with_servers(values, given, total, rank)
    return {key: value for key, value in derived.items() if key not in given}


def _with_servers(
    values: Mapping[str, Any], given: Mapping[str, Any], total: int, rank: int
) -> dict[str, Any]:
    data, replicas = "policy.parallel.data", "rollout.num_replicas"
    server = math.prod(
        _count(values, f"rollout.{name}_parallel_size") for name in ("tensor_model", "data")
    )
    of_policy = of_servers = total
    separate = values.get("launch.placement") == "separate"
    if separate and data in given:
        of_servers = total - _count(given, data) * rank
    elif separate and replicas in given:
        of_policy = total - _count(given, replicas) * server
    elif separate:
        raise ValueError(
            f"launch.placement=separate divides {total} GPUs between policy and servers: set "
            f"{data} or {replicas}"
        )
    servers = _share(of_servers, server, given, replicas)
    step = _count(values, "data.prompts_per_step") * _count(values, "rollout.samples_per_prompt")
    in_turn = given.get("rollout.release_memory", not separate) is True
    return {
        data: _share(of_policy, rank, given, data),
        replicas: servers,
        "rollout.dtype": "bfloat16",
        "rollout.max_in_flight": max(1, min(_MOST_IN_FLIGHT, -(-step // servers))),
        "rollout.release_memory": in_turn,
        **dict.fromkeys((f"policy.offload.{part}" for part in _OFFLOADED), in_turn),
    }


def _share(gpus: int, each: int, given: Mapping[str, Any], key: str) -> int:
    """Returns a number of processes, or of copies of the policy, with `each` GPUs."""
    if key in given:
        return max(1, _count(given, key))
    if each < 1 or gpus < each or gpus % each:
        raise ValueError(
            f"{gpus} GPUs do not divide into groups of {each} for {key}: change a parallel size, "
            f"or set {key}"
        )
    return gpus // each


def _count(values: Mapping[str, Any], key: str) -> int:
    """Returns the value of a key that counts something; 0 where it is no number of it."""
    value = values.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
