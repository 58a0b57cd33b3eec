"""The plan's lines about GPUs: which process has which, what they hold, and what is there.

The memory of a GPU is an estimate. The policy's is that of its backend. A server needs

    b P / T + n c k,    k = 2 L K d b / T

bytes: b those of `rollout.dtype`, P the parameters, T the tensor-parallel size, n completions of c
tokens at a time, and k the bytes of a token in the KV cache, for L layers with K key-value heads of
d numbers (K / T at least 1). vLLM and SGLang take a part of the GPU whatever the sum is,
`rollout.gpu_memory_utilization` or 0.9, which is about their default; completions that do not fit
wait in their queue, but one must fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import AnyConfig
from treadle.trainer.config.topology import make_topology
from treadle.trainer.config.verl_keys import ConfigError
from treadle.trainer.launch.gpus import Gpu, find_gpus
from treadle.trainer.launch.process import ProcessError
from treadle.trainer.preflight.describe import size_in_words
from treadle.trainer.preflight.device_table import Block, aligned, blocks

if TYPE_CHECKING:
    from treadle.policy.backends.description import ModelShape, RankMemory

__all__ = ["ask_cluster", "check_gpus", "device_rows", "found_gpus", "topology_rows"]

_BYTES = {"float32": 4, "bfloat16": 2}
_TAKES_A_PART = ("vllm", "vllm_stock", "sglang")
_DEFAULT_PART = 0.9
# Less of a GPU's memory may be in use by its driver alone.
_USED_BY_OTHERS = 0.05


def check_gpus(config: AnyConfig, *, needed: bool) -> tuple[Gpu, ...]:
    """Returns the GPUs of this machine, if the run is to use some of them.

    Args:
        needed: Whether a machine without any is an error; a plan can be made there too.

    Raises:
        ConfigError: There are fewer than the run is to use.
    """
    launch = config.launch
    if not launch.gpus_per_node or _on_cluster(config):
        return ()
    found = find_gpus()
    if len(found) < launch.gpus_per_node and (found or needed):
        raise ConfigError(
            f"launch.gpus_per_node={launch.gpus_per_node}, and this machine has {len(found)} GPUs "
            "that nvidia-smi lists and CUDA_VISIBLE_DEVICES does not hide: take fewer, or train on "
            "the CPU with launch.gpus_per_node=0 policy.parallel.data=1"
        )
    return found


def ask_cluster(config: AnyConfig) -> str | None:
    """Returns which GPUs a running Ray cluster has for the run; None if the run uses none of them.

    A cluster that lacks something is no error: nodes may join until the run starts, and after.
    """
    launch = config.launch
    if launch.kind != "ray" or launch.address is None or not launch.gpus_per_node:
        return None
    from treadle.trainer.launch.ray import gpus_of_nodes

    try:
        nodes = gpus_of_nodes(launch.address)
    except ProcessError as error:
        return f"no cluster ({error}): the plan is for another, and a run would stop here"
    enough = sum(gpus >= launch.gpus_per_node for gpus in nodes)
    has = f"{len(nodes)} nodes in the cluster, with {', '.join(map(str, nodes))} GPUs"
    if enough >= launch.nodes:
        return f"{has}; some may be in use"
    return (
        f"{has}: {enough} of launch.nodes={launch.nodes} with launch.gpus_per_node="
        f"{launch.gpus_per_node}; a run would wait launch.start_deadline_s for the others"
    )


def _on_cluster(config: AnyConfig) -> bool:
    """Whether processes may be on other machines; Ray without an address has this one only."""
    return config.launch.kind == "ray" and config.launch.address is not None


def device_rows(
    config: Config,
    architecture: ModelShape,
    memory: RankMemory,
    found: Sequence[Gpu],
    cluster: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yields (what, which) for the plan; nothing if GPUs are not assigned.

    Args:
        found: The GPUs of this machine.
    """
    topology = make_topology(config.launch, config.policy, config.rollout)
    if topology is None:
        return
    if config.launch.placement == "separate":
        use = ", policy and servers on different ones"
    else:
        use = f", policy and servers on the same, {'in turn' if _in_turn(config) else 'at once'}"
    yield _total(config, use)
    server = _ServerMemory.of(config, architecture)
    table = list(blocks(topology))
    needs = [_need(config, memory, server, block, found) for block in table]
    yield from aligned(table, [need.text for need in needs])
    if topology.servers:
        yield "  a server", server.text(config, found)
    lacking = {part for need in needs for part in need.lacking}
    if lacking:
        yield "  to make it fit", "; ".join(_ADVICE[part] for part in sorted(lacking))
    if memory.host:
        most = max(Counter(rank.node for rank in topology.ranks).values())
        yield (
            "  host memory",
            f"about {size_in_words(most * memory.host)} on a node with {most} ranks, for what "
            "policy.offload takes off the GPUs",
        )
    yield "  found", cluster or found_gpus(config, found)


def topology_rows(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """Yields the GPUs and the processes of each node; nothing if GPUs are not assigned."""
    rollout = config.rollout if isinstance(config, Config) else None
    topology = make_topology(config.launch, config.policy, rollout)
    if topology is None:
        return
    yield _total(config)
    table = list(blocks(topology))
    yield from aligned(table, [""] * len(table))


def _total(config: AnyConfig, use: str = "") -> tuple[str, str]:
    launch = config.launch
    return (
        "GPUs",
        f"{launch.nodes * launch.gpus_per_node}: launch.nodes={launch.nodes} x "
        f"launch.gpus_per_node={launch.gpus_per_node}{use}",
    )


def _in_turn(config: Config) -> bool:
    return config.launch.placement != "separate" and config.rollout.release_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class _ServerMemory:
    """The need of a server per GPU, in bytes; see the module.

    Attributes:
        completions: Number of completions at a time per copy of the model.
        part: Share of a GPU that the engine takes; None: what it needs.
    """

    weights: int
    completion: int
    completions: int
    part: float | None

    @staticmethod
    def of(config: Config, architecture: ModelShape) -> _ServerMemory:
        rollout = config.rollout
        size, tensor = _BYTES[rollout.dtype], rollout.tensor_model_parallel_size
        heads = max(1, architecture.num_kv_heads // tensor)
        token = 2 * architecture.num_layers * heads * architecture.head_dim * size
        part = rollout.gpu_memory_utilization
        if part is None and rollout.name in _TAKES_A_PART:
            part = _DEFAULT_PART
        return _ServerMemory(
            weights=size * architecture.num_parameters // tensor,
            completion=rollout.context_length * token,
            completions=-(-rollout.max_in_flight // rollout.data_parallel_size),
            part=part,
        )

    @property
    def wanted(self) -> int:
        """Bytes with which no completion waits."""
        return self.weights + self.completions * self.completion

    def taken(self, gpu_bytes: int) -> int:
        """Returns the bytes that the engine takes of a GPU with so many."""
        return self.wanted if self.part is None else int(self.part * gpu_bytes)

    def text(self, config: Config, found: Sequence[Gpu]) -> str:
        """Returns the plan's line about it."""
        rollout = config.rollout
        cache = self.completions * self.completion
        text = (
            f"per GPU {size_in_words(self.weights)} of weights, and {size_in_words(cache)} of KV "
            f"cache for {rollout.max_in_flight} completions of {rollout.context_length} tokens"
        )
        if self.part is None:
            return text
        given = rollout.gpu_memory_utilization is not None
        source = "rollout.gpu_memory_utilization" if given else "about the engine's default"
        text += f"; the engine takes {self.part:g} of the GPU ({source})"
        if found:
            room = self.taken(min(gpu.memory_bytes for gpu in found)) - self.weights
            at_a_time = max(0, room // self.completion)
            if at_a_time < self.completions:
                text += f", with room for {at_a_time} of such completions: the others wait"
        return text


_ADVICE = {
    "policy": "of the policy, see policy.offload, policy.recompute, policy.micro_batch_tokens and "
    "policy.parallel",
    "server": "of a server, see rollout.tensor_model_parallel_size, rollout.max_in_flight and "
    "rollout.gpu_memory_utilization",
    "turns": "rollout.release_memory=true, and policy.offload, for policy and servers in turn",
    "others": "end what nvidia-smi lists on the GPUs that are in use",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """The need of a GPU of a block.

    Attributes:
        lacking: Keys of `_ADVICE`, if it may not fit.
    """

    text: str
    lacking: frozenset[str] = frozenset()


def _need(
    config: Config,
    memory: RankMemory,
    server: _ServerMemory,
    block: Block,
    found: Sequence[Gpu],
) -> _Need:
    """Returns what each GPU of a block needs, and whether that is there."""
    if not block.ranks and not block.servers:
        return _Need(text="")
    gpus = [found[index] for index in block.gpus] if found else []
    total = min((gpu.memory_bytes for gpu in gpus), default=None)
    # At the moment of training and at that of sampling; in turn, or both at once.
    train = memory.peak if block.ranks else 0
    rest = train and (memory.between if _in_turn(config) else memory.peak)
    parts = [f"{size_in_words(train)} to train"] if train else []
    sample = 0
    if block.servers and total is None and server.part is not None:
        parts.append(f"{server.part:g} of the GPU to sample")
    elif block.servers:
        sample = server.taken(total or 0)
        parts.append(f"{size_in_words(sample)} to sample")
    if block.servers and rest and _in_turn(config):
        parts[-1] += f" beside {size_in_words(rest)} of the policy"
    text = "about " + (", then " if _in_turn(config) else " and ").join(parts)
    if total is None:
        return _Need(text=text)
    most = max(train, sample + rest)
    others = total - min(gpu.free_bytes for gpu in gpus)
    others = others if others > _USED_BY_OTHERS * total else 0
    text += f", of {size_in_words(total)}"
    if others:
        text += f" with {size_in_words(others)} in use"
    lacking = set()
    if train > total:
        lacking.add("policy")
    if sample > total:
        lacking.add("server")
    if not lacking and most > total:
        lacking |= {"policy", "server"} if _in_turn(config) else {"turns"}
    if not lacking and most > total - others:
        lacking.add("others")
    if block.servers and server.weights + server.completion > server.taken(total):
        lacking.add("server")
    return _Need(text=f"{text}: {'may NOT fit' if lacking else 'fits'}", lacking=frozenset(lacking))


def found_gpus(config: AnyConfig, found: Sequence[Gpu]) -> str:
    """Returns the plan's line about the GPUs of this machine."""
    if _on_cluster(config):
        return (
            "not looked for: Ray places the processes when the run starts; `treadle doctor` with "
            "the same arguments asks its nodes"
        )
    if not found:
        return "none on this machine: the plan is for another, and a run would stop here"
    names = sorted({gpu.name for gpu in found})
    return f"{len(found)} on this machine ({', '.join(names)})"
