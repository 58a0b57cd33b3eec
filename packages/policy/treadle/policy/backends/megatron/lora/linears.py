"""Megatron's parallel linear layers with adapters of low rank.

y = W x + s B A x, with s = alpha / rank (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large
Language Models", equation 3). Each matrix of Hugging Face has its own A and B, as in PEFT: a fused
layer (queries, keys and values; gate and up) joins the outputs of its adapters in the order of the
rows of its weight. Where the files have it in one matrix too, it has one adapter, and the rows of B
are in the order of the rows of its weight.

Invariant: an adapter computes the same for every tensor-parallel size. In a column-parallel layer
every rank holds all of A and its rows of B; in a row-parallel layer its columns of A and all of B.
What ranks exchange is A x, of `rank` columns. A parameter that is whole on every rank gets the same
gradient on each of them. Under sequence parallelism each rank computes the part of its rows, and
Megatron sums the parts, as it does for norms.

Shape suffixes: P packed rows, I inputs, O outputs, R rank times the number of adapted matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.experts.layer import mlp_submodules

device.install()

from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.config.policy import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapters of one kind of layer.

    Attributes:
        outputs: Rows of each matrix that is fused in the layer, in order, over all ranks.
        blocks: Number of equal blocks, over all ranks, in which the rows of the matrices alternate
            (queries, keys and values: one per key-value head); None: one per rank.
    """

    outputs: Mapping[str, int]
    targets: Sequence[str]
    rank: int
    scaling: float
    blocks: int | None


def adapt_layer(layer: Any, lora: LoraConfig, architecture: Architecture) -> None:
    """Puts adapters into the layer spec of a Megatron GPT, where `lora.targets` wants them."""
    attention = layer.submodules.self_attention.submodules
    mlp = mlp_submodules(layer)
    heads, adapted = architecture.num_kv_heads, architecture.adapted(lora.targets)
    for place, slot, kind, names, blocks in (
        (attention, "linear_qkv", AdaptedColumns, "q_proj k_proj v_proj qkv_proj", heads),
        (attention, "linear_proj", AdaptedRows, "o_proj", None),
        (mlp, "linear_fc1", AdaptedColumns, "gate_proj up_proj gate_up_proj", None),
        (mlp, "linear_fc2", AdaptedRows, "down_proj", None),
    ):
        fused = [name for name in names.split() if name in architecture.matrices]
        targets = [name for name in fused if name in adapted]
        if targets:
            spec = AdapterSpec(
                outputs={name: architecture.matrices[name][1] for name in fused},
                targets=targets,
                rank=lora.rank,
                scaling=lora.scaling,
                blocks=blocks,
            )
            setattr(place, slot, ModuleSpec(module=kind, params={"adapters": spec}))


class Adapters(torch.nn.Module):
    """A and B of the matrices of one linear layer, as this rank holds them.

    The parameters are `A_NAME` [rank, inputs] and `B_NAME` [outputs, rank]; both are zero until
    `adapter.start` fills them.
    """

    def __init__(
        self, spec: AdapterSpec, weight: Tensor, *, split: str, ranks: int, sequence_parallel: bool
    ) -> None:
        """Creates the parameters.

        Args:
            weight: The layer's weight on this rank, for inputs, type and device.
            split: "A" if the ranks share the columns of A, "B" if they share the rows of B.
            sequence_parallel: Whether each rank computes its rows of the sequence only.
        """
        super().__init__()
        self.spec = spec
        self.on = True
        shared = ranks if split == "B" else 1
        self._outputs = {name: rows // shared for name, rows in spec.outputs.items()}
        self._blocks = 1 if spec.blocks is None else spec.blocks // ranks
        self.split_dims: dict[str, int] = {}
        """Along which dimension the ranks share a parameter, for those that they share."""
        for name in spec.targets:
            for letter, rows, columns in (
                ("A", spec.rank, weight.shape[1]),
                ("B", self._outputs[name], spec.rank),
            ):
                parameter = torch.nn.Parameter(weight.new_zeros(rows, columns))
                dim = 1 if letter == "A" else 0
                set_tensor_model_parallel_attributes(parameter, letter == split, dim, 1)
                if letter == split:
                    self.split_dims[f"{letter}_{name}"] = dim
                elif sequence_parallel:
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]  # Megatron's
                self.register_parameter(f"{letter}_{name}", parameter)

    def project(self, x_P1I: Tensor) -> Tensor:
        """Returns A x [P, 1, R] of all adapters, one after another."""
        a_RI = torch.cat([self.get_parameter(f"A_{name}") for name in self.spec.targets])
        return F.linear(x_P1I, a_RI)

    def expand(self, u_P1R: Tensor) -> Tensor:
        """Returns s B u [P, 1, O] of what `project` gave, in the order of the layer's rows."""
        parts = dict(
            zip(self.spec.targets, torch.split(u_P1R, self.spec.rank, dim=-1), strict=True)
        )
        outputs = {
            name: F.linear(part, self.get_parameter(f"B_{name}")) for name, part in parts.items()
        }
        return self._fuse(outputs, u_P1R) * self.spec.scaling

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Returns s B A, float32, as it is added to this rank's weight."""
        products = {
            name: (
                self.get_parameter(f"B_{name}").float() @ self.get_parameter(f"A_{name}").float()
            ).t()
            for name in self.spec.targets
        }
        some = next(iter(products.values()))
        return self._fuse(products, some).t() * self.spec.scaling

    def _fuse(self, outputs: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Joins the outputs [..., rows of a matrix] of all matrices; those not adapted are 0."""
        parts = [
            outputs[name] if name in outputs else like.new_zeros(*like.shape[:-1], rows)
            for name, rows in self._outputs.items()
        ]
        if len(parts) == 1:
            return parts[0]
        blocks = [part.reshape(*part.shape[:-1], self._blocks, -1) for part in parts]
        return torch.cat(blocks, -1).flatten(-2)


class _Adapted:
    """What a parallel layer with adapters adds to Megatron's, its next base."""

    _SPLIT: ClassVar[str]
    """Which of A and B the ranks share."""
    _SPLIT_DIMS: ClassVar[Mapping[str, int]]
    """Along which dimension they share the layer's own parameters."""

    def __init__(self, *args: Any, adapters: AdapterSpec, **kwargs: Any) -> None:
        """Called by Megatron; `adapters` is from the layer spec."""
        super().__init__(*args, **kwargs)
        layer: Any = self
        self.lora = Adapters(
            adapters,
            layer.weight,
            split=self._SPLIT,
            ranks=layer.tp_group.size(),
            sequence_parallel=layer.sequence_parallel,
        )

    def forward(self, x_P1I: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Returns Megatron's output with that of the adapters, and the bias if Megatron adds it."""
        megatron: Any = super()
        output, bias = megatron.forward(x_P1I, *args, **kwargs)
        if not self.lora.on:
            return output, bias
        u_P1R = self._exchange(self.lora.project(x_P1I))
        return output + self.lora.expand(u_P1R), bias

    def _exchange(self, u_P1R: Tensor) -> Tensor:
        """Returns A x of all rows that this rank's rows of B, or all of B, are for."""
        raise NotImplementedError

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """As Megatron's, with the adapters."""
        layer: Any = self
        adapters = {f"lora.{name}": dim for name, dim in self.lora.split_dims.items()}
        sharded = make_sharded_tensors_for_checkpoint(
            layer.state_dict(prefix="", keep_vars=True),
            prefix,
            {**self._SPLIT_DIMS, **adapters},
            sharded_offsets,
            tp_group=layer.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        # Each rank has some of its gate's rows and some of its up's, as it has of the weight.
        if (name := f"{prefix}lora.B_gate_up_proj") in sharded:
            sharded[name] = apply_swiglu_sharded_factory(sharded[name], sharded_offsets)
        return sharded


class AdaptedColumns(_Adapted, ColumnParallelLinear):
    """A column-parallel layer with adapters."""

    _SPLIT: ClassVar[str] = "B"
    _SPLIT_DIMS: ClassVar[Mapping[str, int]] = {"weight": 0, "bias": 0}

    def _exchange(self, u_P1R: Tensor) -> Tensor:
        exchange = (
            gather_from_sequence_parallel_region
            if self.sequence_parallel
            else copy_to_tensor_model_parallel_region
        )
        u_P1R = exchange(u_P1R, group=self.tp_group)
        return u_P1R


class AdaptedRows(_Adapted, RowParallelLinear):
    """A row-parallel layer with adapters."""

    _SPLIT: ClassVar[str] = "A"
    _SPLIT_DIMS: ClassVar[Mapping[str, int]] = {"weight": 1}

    def _exchange(self, u_P1R: Tensor) -> Tensor:
        exchange = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        u_P1R = exchange(u_P1R, group=self.tp_group)
        return u_P1R


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of this name belongs to an adapter."""
    return ".lora." in name


def adapters_of(module: torch.nn.Module) -> Adapters | None:
    """Returns the adapters of a layer that has some."""
    return module.lora if isinstance(module, _Adapted) else None


def freeze_base(model: torch.nn.Module) -> None:
    """Leaves the adapters as the only parameters with a gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


@contextmanager
def switched_off(model: torch.nn.Module) -> Iterator[None]:
    """Computes without adapters within the context: the model that training started from."""
    every = [adapters for module in model.modules() if (adapters := adapters_of(module))]
    for adapters in every:
        adapters.on = False
    try:
        yield
    finally:
        for adapters in every:
            adapters.on = True
