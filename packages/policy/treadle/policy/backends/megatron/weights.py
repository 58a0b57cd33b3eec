"""The weight map: each Megatron parameter and the Hugging Face tensors that make it up.

Invariant: `load` followed by `export` returns the same bits, for every supported architecture
and every tensor-, pipeline- and expert-parallel size. A layout defines two things: how Hugging Face
tensors make up the whole Megatron tensor, and how that tensor is cut over tensor-parallel ranks.

With LoRA, a weight is exported with its adapters merged into it.

`export` is collective over the tensor-parallel group, one parameter at a time; each pipeline stage
exports its own layers, and each tensor-parallel group the experts that its ranks have, so nothing
moves between them, and no sender waits for another.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from treadle.policy.backends.megatron.lora.linears import adapters_of, is_adapter
from treadle.policy.backends.vision.shape import NAMING
from treadle.policy.client.types import NamedTensor, TensorSpec

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture, Blocks
    from treadle.policy.backends.megatron.model import PolicyModel
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.client.types import ElementType


class Layout:
    """How one parameter is assembled and cut; this one is whole on every rank, as norms are."""

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank has the whole tensor."""
        return type(self) is Layout

    def merge(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        """Returns the whole Megatron tensor, without vocabulary padding."""
        return parts[0]

    def split(self, whole: Tensor, model: Architecture) -> list[Tensor]:
        """Returns the Hugging Face tensors: the inverse of `merge`."""
        return [whole]

    def shard(self, whole: Tensor, ranks: int, rank: int, shape: torch.Size) -> Tensor:
        """Returns the part of one tensor-parallel rank, of the given shape."""
        return whole

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor: the inverse of `shard` over all ranks."""
        return shards[0]


def _cat(shards: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenates shards; makes no copy of a single one, so that its export costs nothing."""
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)


class _OutputRows(Layout):
    """One tensor cut along its output dimension: B of a column-parallel layer's adapter."""

    def shard(self, whole: Tensor, ranks: int, rank: int, shape: torch.Size) -> Tensor:
        return whole.chunk(ranks, 0)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _cat(shards, 0)


class _InputColumns(Layout):
    """One tensor cut along its input dimension: projections back to the hidden size."""

    def shard(self, whole: Tensor, ranks: int, rank: int, shape: torch.Size) -> Tensor:
        return whole.chunk(ranks, 1)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _cat(shards, 1)


class _Qkv(_OutputRows):
    """Rows [queries of a key-value head, its key, its value], head after head."""

    def merge(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        heads = [part.reshape(model.num_kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(heads, 1).flatten(0, 1)

    def split(self, whole: Tensor, model: Architecture) -> list[Tensor]:
        sizes = [n * model.head_dim for n in (model.num_heads // model.num_kv_heads, 1, 1)]
        heads = whole.reshape(model.num_kv_heads, -1, *whole.shape[1:])
        return [x.flatten(0, 1) for x in torch.split(heads, sizes, 1)]


class _GateAndUp(Layout):
    """[gate rows, up rows] on every rank; the whole is [2, rows, columns]."""

    def merge(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        return torch.stack(list(parts))

    def split(self, whole: Tensor, model: Architecture) -> list[Tensor]:
        return list(whole)

    def shard(self, whole: Tensor, ranks: int, rank: int, shape: torch.Size) -> Tensor:
        return whole.chunk(ranks, 1)[rank].flatten(0, 1)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _cat([s.reshape(2, -1, s.shape[-1]) for s in shards], 1)


class _FusedQkv(_Qkv):
    """The same of one matrix with all queries, all keys and all values."""

    def merge(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        rows = [n * model.head_dim for n in (model.num_heads, *[model.num_kv_heads] * 2)]
        return super().merge(torch.split(parts[0], rows), model)

    def split(self, whole: Tensor, model: Architecture) -> list[Tensor]:
        return [torch.cat(super().split(whole, model))]


class _FusedGateAndUp(_GateAndUp):
    """The same of one matrix with all gates above all ups."""

    def merge(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        return parts[0].reshape(2, -1, *parts[0].shape[1:])

    def split(self, whole: Tensor, model: Architecture) -> list[Tensor]:
        return [whole.flatten(0, 1)]


class _Vocabulary(Layout):
    """Rows of ids, padded with zeros at the end, cut into equal runs."""

    def split(self, whole: Tensor, model: Architecture) -> list[Tensor]:
        return [whole[: model.vocab_size]]

    def shard(self, whole: Tensor, ranks: int, rank: int, shape: torch.Size) -> Tensor:
        rows = whole[rank * shape[0] : (rank + 1) * shape[0]]
        padded = whole.new_zeros(shape)
        padded[: len(rows)] = rows
        return padded

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _cat(shards, 0)


_SAME, _COLUMNS, _ROWS, _VOCAB = Layout(), _InputColumns(), _OutputRows(), _Vocabulary()
_QKV, _FUSED_QKV, _GATED, _FUSED_GATED = _Qkv(), _FusedQkv(), _GateAndUp(), _FusedGateAndUp()

_FUSED: Final[dict[str, Layout]] = {"qkv_proj": _FUSED_QKV, "gate_up_proj": _FUSED_GATED}


def _layer_map(blocks: Blocks) -> dict[str, tuple[Layout, tuple[str, ...]]]:
    """Returns the layout and the files' names of each parameter that a layer may have."""
    norms = blocks.norms
    qkv: tuple[Layout, list[str]] = (_QKV, ["q_proj", "k_proj", "v_proj"])
    gated: tuple[Layout, list[str]] = (_GATED, ["gate_proj", "up_proj"])
    qkv = (_FUSED_QKV, ["qkv_proj"]) if blocks.fused_qkv else qkv
    gated = (_FUSED_GATED, ["gate_up_proj"]) if blocks.fused_gate_up else gated
    entries: dict[str, tuple[Layout, list[str]]] = {
        "input_layernorm.weight": (_SAME, [norms.before_attention]),
        "self_attention.linear_qkv.weight": (qkv[0], [f"self_attn.{x}" for x in qkv[1]]),
        "self_attention.q_layernorm.weight": (_SAME, ["self_attn.q_norm"]),
        "self_attention.k_layernorm.weight": (_SAME, ["self_attn.k_norm"]),
        "self_attention.linear_proj.weight": (_COLUMNS, ["self_attn.o_proj"]),
        "pre_mlp_layernorm.weight": (_SAME, [norms.before_mlp]),
        "mlp.linear_fc1.weight": (gated[0], [f"mlp.{x}" for x in gated[1]]),
        "mlp.linear_fc2.weight": (_COLUMNS, ["mlp.down_proj"]),
        "mlp.router.weight": (_SAME, ["mlp.gate"]),
    }
    for slot, after in (("self_attn_bda", norms.after_attention), ("mlp_bda", norms.after_mlp)):
        if after is not None:
            entries[f"{slot}.norm.weight"] = (_SAME, [after])
    named = {name: (of, tuple(f"{m}.weight" for m in ms)) for name, (of, ms) in entries.items()}
    biases = tuple(f"self_attn.{x}.bias" for x in qkv[1])
    return {**named, "self_attention.linear_qkv.bias": (qkv[0], biases)}


_EMBEDDING: Final = "model.embed_tokens.weight"
_WHOLE_MODEL: Final[dict[str, tuple[Layout, tuple[str, ...]]]] = {
    "embedding.word_embeddings.weight": (_VOCAB, (_EMBEDDING,)),
    "decoder.final_layernorm.weight": (_SAME, ("model.norm.weight",)),
    "output_layer.weight": (_VOCAB, ("lm_head.weight",)),
}
_LANGUAGE: Final = "model."
_TOWER: Final = "vision.model."
_LAYER_NAME: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAME: Final = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_ADAPTER_NAME: Final = re.compile(r"decoder\.layers\.(\d+)\.(\w+)\.\w+\.lora\.([AB])_(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEntry:
    """One Megatron parameter of this rank and the tensors it is made of.

    Attributes:
        exported: False for the last stage's copy of a tied embedding; the first stage exports it.
        expert: Number of the expert that it belongs to, which is whole on its rank; else None.
        delta: Returns what is added to the parameter when it is exported, float32; None: nothing.
    """

    parameter: torch.nn.Parameter
    layout: Layout
    hf_names: tuple[str, ...]
    exported: bool = True
    expert: int | None = None
    delta: Callable[[], Tensor] | None = None


def entries(model: PolicyModel, architecture: Architecture) -> Iterator[WeightEntry]:
    """Yields every weight of this rank's pipeline stage, in model order, without adapters."""
    offset, layer_map = _first_layer(model), _layer_map(architecture.blocks)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        if name.startswith(_TOWER):
            place = NAMING[architecture.model_type].tower
            hf_name = place + name.removeprefix(_TOWER)
            yield WeightEntry(parameter=parameter, layout=_SAME, hf_names=(hf_name,))
            continue
        match, expert = _LAYER_NAME.fullmatch(name), None
        if match:
            layer, rest = int(match[1]), match[2]
            place = f"model.layers.{layer + offset}."
            if found := _EXPERT_NAME.fullmatch(rest):
                rest = f"mlp.{found[2]}"
                expert = model.decoder.layers[layer].mlp.local_expert_indices[int(found[1])]
            layout, suffixes = layer_map[rest]
            if expert is not None:
                suffixes = tuple(s.replace("mlp.", f"mlp.experts.{expert}.") for s in suffixes)
            hf_names = tuple(place + s for s in suffixes)
        else:
            layout, hf_names = _WHOLE_MODEL[name]
        copied = name == "output_layer.weight" and architecture.tied
        hf_names = (_EMBEDDING,) if copied else hf_names
        yield WeightEntry(
            parameter=parameter,
            layout=layout,
            hf_names=tuple(_published(hf_name, architecture) for hf_name in hf_names),
            exported=not copied,
            expert=expert,
            delta=_delta(model, name),
        )


def _published(name: str, architecture: Architecture) -> str:
    """Returns what the files of the model call a weight of its language model."""
    naming = NAMING.get(architecture.model_type)
    if naming is None or not name.startswith(_LANGUAGE):
        return name
    return naming.language + name.removeprefix(_LANGUAGE)


def adapter_place(architecture: Architecture) -> str:
    """Returns where PEFT has the layers of the model: as transformers' class has them."""
    inner = "model.layers" if architecture.vision is None else "model.language_model.layers"
    return f"base_model.model.{inner}"


def adapter_entries(model: PolicyModel, architecture: Architecture) -> Iterator[WeightEntry]:
    """Yields every parameter of this stage's adapters, under the names of PEFT."""
    offset, place = _first_layer(model), adapter_place(architecture)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            match = _ADAPTER_NAME.fullmatch(name)
            assert match is not None, name
            layer, part, letter, matrix = match.groups()
            block = "self_attn" if part == "self_attention" else "mlp"
            split = _COLUMNS if letter == "A" else _FUSED.get(matrix, _ROWS)
            yield WeightEntry(
                parameter=parameter,
                layout=split if parameter.tensor_model_parallel else _SAME,
                hf_names=(f"{place}.{int(layer) + offset}.{block}.{matrix}.lora_{letter}.weight",),
            )


def _first_layer(model: PolicyModel) -> int:
    """Returns the number of layers before this stage."""
    layers = model.decoder.layers
    return layers[0].layer_number - 1 if len(layers) else 0


def _delta(model: PolicyModel, name: str) -> Callable[[], Tensor] | None:
    owner, _, kind = name.rpartition(".")
    adapters = adapters_of(model.get_submodule(owner)) if kind == "weight" else None
    return adapters.delta if adapters is not None else None


class TensorsByName(Protocol):
    """Whole tensors by their Hugging Face names: a folder's, or a dictionary's."""

    def __getitem__(self, name: str, /) -> Tensor:
        """Returns a tensor, or raises a KeyError."""
        ...


def load(
    entries: Iterable[WeightEntry], weights: TensorsByName, architecture: Architecture, w: World
) -> None:
    """Fills the parameters of this rank.

    Raises:
        KeyError: A tensor is missing.
        ValueError: The shape of a tensor does not fit the config.
    """
    with torch.no_grad():
        for entry in entries:
            parts = [weights[name] for name in entry.hf_names]
            whole = entry.layout.merge(parts, architecture)
            split = w.split(expert=entry.expert is not None)
            shard = entry.layout.shard(whole, split.ranks, split.rank, entry.parameter.shape)
            if shard.numel() != entry.parameter.numel():
                raise ValueError(
                    f"{', '.join(entry.hf_names)}: shapes {[tuple(p.shape) for p in parts]} do "
                    "not fit the model's config.json"
                )
            entry.parameter.copy_(shard.view_as(entry.parameter))


@torch.no_grad()
def are_finite(model: torch.nn.Module) -> bool:
    """Returns whether no parameter of any rank is infinite or NaN; collective over all ranks."""
    finite = torch.stack([torch.isfinite(p).all() for p in model.parameters()]).all()
    everywhere = finite.to(torch.int32)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def export(
    entries: Iterable[WeightEntry], architecture: Architecture, world: World, *, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """Yields the tensors of this rank's stage, whole, under their Hugging Face names.

    Of the experts that ranks share, each tensor group yields those that its ranks have.
    """
    for entry in entries:
        if not entry.exported:
            continue
        local = entry.parameter.detach()
        if entry.delta is not None:
            local = local.float() + entry.delta()
        local = local.to(dtype)
        group = None if entry.layout.replicated else world.tensor_group
        shards = [local] if group is None else _gather(local, group)
        wholes = [[shard] for shard in shards] if entry.expert is not None else [shards]
        for (names, _), of_whole in zip(_names(entry, architecture, world), wholes, strict=True):
            whole = entry.layout.unshard(of_whole)
            for name, part in zip(names, entry.layout.split(whole, architecture), strict=True):
                yield NamedTensor(name=name, tensor=part)


def _names(
    entry: WeightEntry, architecture: Architecture, world: World
) -> list[tuple[tuple[str, ...], bool]]:
    """Returns the names that this rank's export gives a parameter, and whether it sends them.

    Those of an expert are of one expert per rank of the tensor group. Only the first rank of a
    tensor group sends, as the others take part in its export.
    """
    first = world.tensor_rank == 0
    if entry.expert is None or architecture.experts is None:
        return [(entry.hf_names, first and world.split(expert=False).copy == 0)]
    of_rank = architecture.experts.number // world.expert
    result = []
    for expert_rank, copy in world.expert_places:
        number = entry.expert + (expert_rank - world.expert_rank) * of_rank
        old, new = f".experts.{entry.expert}.", f".experts.{number}."
        names = tuple(name.replace(old, new) for name in entry.hf_names)
        result.append((names, first and copy == 0))
    return result


def _gather(local: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    # Flat, because gloo does not accept the stacked shape that NCCL accepts.
    flat = local.new_empty(group.size() * local.numel())
    dist.all_gather_into_tensor(flat, local.contiguous().view(-1), group=group)
    return list(flat.view(group.size(), *local.shape))


def specs(
    entries: Iterable[WeightEntry],
    architecture: Architecture,
    world: World,
    *,
    dtype: ElementType,
) -> tuple[TensorSpec, ...]:
    """Returns all tensors in export order, first stage first. Collective over all ranks."""
    mine = [
        TensorSpec(name=name, shape=shape, element_type=dtype, sender=world.rank)
        for entry in entries
        if entry.exported
        for names, sends in _names(entry, architecture, world)
        if sends
        for name, shape in zip(names, _shapes(entry, architecture, world), strict=True)
    ]
    gathered: list[list[TensorSpec]] = [[] for _ in range(world.size)]
    dist.all_gather_object(gathered, mine)
    return tuple(itertools.chain.from_iterable(gathered))


def _shapes(entry: WeightEntry, architecture: Architecture, world: World) -> list[tuple[int, ...]]:
    """Returns the shapes of the whole tensors, by running the layout on tensors without data."""
    local = torch.empty(entry.parameter.shape, device="meta")
    expert = entry.expert is not None
    count = 1 if entry.layout.replicated else world.split(expert=expert).ranks
    whole = entry.layout.unshard([local] * count)
    return [tuple(part.shape) for part in entry.layout.split(whole, architecture)]
