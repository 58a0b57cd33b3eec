"""The plan's lines about GPUs: which process has which, what they hold, and what is there.

The memory of a GPU is an estimate. The policy's is that of `policy.megatron.memory`. A server needs

    b P / T + n c k,    k = 2 L K d b / T

bytes: b those of `rollout.dtype`, P the parameters, T the tensor-parallel size, n completions of c
tokens at a time, and k the bytes of a token in the KV cache, for L layers with K key-value heads of
d numbers (K / T at least 1). An engine with `rollout.gpu_memory_utilization` takes that part of the
GPU whatever the sum is; completions that do not fit wait in its queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.launch.gpus import Gpu, find_gpus
from treadle.trainer.launch.topology import Devices, Topology, make_topology

if TYPE_CHECKING:
    from treadle.trainer.policy.megatron.architecture import Architecture
    from treadle.trainer.policy.megatron.memory import RankMemory

__all__ = ["check_gpus", "device_rows", "found_gpus", "topology_rows"]

_SHOWN_NODES = 4
_BYTES = {"float32": 4, "bfloat16": 2}


def check_gpus(config: AnyConfig, *, needed: bool) -> tuple[Gpu, ...]:
    """Returns the GPUs of this machine, if the run is to use some of them.

    Args:
        config: The run's configuration.
        needed: Whether a machine without any is an error; a plan can be made there too.

    Raises:
        ConfigError: There are fewer than the run is to use.
    """
    launch = config.launch
    if launch.kind != "local" or not launch.gpus_per_node:
        return ()
    found = find_gpus()
    if len(found) < launch.gpus_per_node and (found or needed):
        raise ConfigError(
            f"launch.gpus_per_node={launch.gpus_per_node}, and this machine has {len(found)} GPUs "
            "that nvidia-smi lists and CUDA_VISIBLE_DEVICES does not hide: take fewer, or train on "
            "the CPU with launch.gpus_per_node=0 policy.parallel.data=1"
        )
    return found


def device_rows(
    config: Config, architecture: Architecture, memory: RankMemory, found: Sequence[Gpu]
) -> Iterator[tuple[str, str]]:
    """Yields (what, which) for the plan; nothing if GPUs are not assigned.

    Args:
        config: The run's configuration.
        architecture: Of its model.
        memory: Of a policy rank.
        found: The GPUs of this machine.
    """
    if not config.launch.gpus_per_node:
        return
    if config.launch.placement == "separate":
        use = ", policy and servers on different ones"
    else:
        turns = "in turn" if config.rollout.release_memory else "at once"
        use = f", policy and servers on the same, {turns}"
    yield from topology_rows(config, use)
    yield from _memory_rows(config, architecture, memory, found)
    yield "  found", found_gpus(config, found)


def topology_rows(config: AnyConfig, use: str = "") -> Iterator[tuple[str, str]]:
    """Yields the GPUs and the processes of each node; nothing if GPUs are not assigned.

    Args:
        config: The run's configuration.
        use: How the processes share the GPUs, to follow their number.
    """
    topology = make_topology(config)
    if topology is None:
        return
    yield (
        "GPUs",
        f"{topology.nodes * topology.gpus_per_node}: launch.nodes={topology.nodes} x "
        f"launch.gpus_per_node={topology.gpus_per_node}{use}",
    )
    for node in range(min(topology.nodes, _SHOWN_NODES)):
        yield f"  node {node}", _node(topology, node)
    if (more := topology.nodes - _SHOWN_NODES) > 0:
        yield f"  {more} more nodes", "in the same order"


def _node(topology: Topology, node: int) -> str:
    parts = []
    for name, every in (("policy", topology.ranks), ("rollout", topology.servers)):
        here = [(n, each) for n, each in enumerate(every) if each.node == node]
        if len(here) > 1 and all(len(each.indices) == 1 for _, each in here):
            first, last = here[0], here[-1]
            where = f"{first[1].indices[0]} to {last[1].indices[0]}"
            parts.append(f"{name}-{first[0]} to {name}-{last[0]} on GPUs {where}, one each")
        elif here:
            parts.append(", ".join(f"{name}-{n} on {_gpus(each)}" for n, each in here))
    return "; ".join(parts) or "nothing"


def _gpus(devices: Devices) -> str:
    first, last = devices.indices[0], devices.indices[-1]
    return f"GPU {first}" if first == last else f"GPUs {first} to {last}"


def _server_bytes(config: Config, architecture: Architecture) -> tuple[int, int]:
    """Returns the bytes of weights and of the KV cache per GPU of a server; see the module."""
    rollout = config.rollout
    size, tensor = _BYTES[rollout.dtype], rollout.tensor_model_parallel_size
    heads = max(1, architecture.num_kv_heads // tensor)
    token = 2 * architecture.num_layers * heads * architecture.head_dim * size
    each = -(-rollout.max_in_flight // rollout.data_parallel_size)
    return size * architecture.num_parameters // tensor, each * rollout.context_length * token


def _memory_rows(
    config: Config, architecture: Architecture, memory: RankMemory, found: Sequence[Gpu]
) -> Iterator[tuple[str, str]]:
    rollout, separate = config.rollout, config.launch.placement == "separate"
    weights, cache = _server_bytes(config, architecture)
    server = (
        f"a server {_gb(weights)} of weights and {_gb(cache)} of KV cache for "
        f"{rollout.max_in_flight} completions of {rollout.context_length} tokens"
    )
    share = rollout.gpu_memory_utilization
    if share is not None:
        server += f", within {share:g} of the GPU (rollout.gpu_memory_utilization)"
    yield "  a GPU holds", f"about {_gb(memory.peak)} of the policy while it trains; {server}"
    if not found:
        return
    smallest = min(gpu.memory_bytes for gpu in found)
    of_server = weights + cache if share is None else int(share * smallest)
    turns = not separate and rollout.release_memory
    beside = 0 if separate else memory.between if turns else memory.peak
    most = max(of_server + beside, memory.peak)
    fits = "it fits" if most <= smallest else "it may NOT fit"
    advice = (
        "" if most <= smallest else ": see policy.offload, policy.recompute and policy.parallel"
    )
    yield "  at most", f"about {_gb(most)} at a time, of {_gb(smallest)}: {fits}{advice}"


def found_gpus(config: AnyConfig, found: Sequence[Gpu]) -> str:
    """Returns what the plan says of the GPUs of this machine."""
    if config.launch.kind == "ray":
        return "not looked for: Ray places the processes when the run starts"
    if not found:
        return "none on this machine: the plan is for another, and a run would stop here"
    names = sorted({gpu.name for gpu in found})
    return f"{len(found)} on this machine ({', '.join(names)})"


def _gb(count: int) -> str:
    return f"{count / 1e9:.3g} GB"
