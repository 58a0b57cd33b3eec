"""The description of the FSDP backend; see `backends.description`."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from treadle.policy.backends.description import (
    BackendDescription,
    Capabilities,
    MemoryEstimate,
    ModelShape,
    UnsupportedModelError,
    adapted_names,
    raised,
    refuse_quantised,
)
from treadle.policy.backends.fsdp.model_types import (
    MODEL_TYPES,
    NOT_SPLIT,
    OWN_EXPERTS,
    REFUSED,
    SHARED,
)
from treadle.policy.backends.vision.shape import NAMING, VisionShape, check_reference
from treadle.policy.client.hf_files import (
    DEQUANTISED,
    missing_weights,
    tensor_shapes,
    weight_files,
)
from treadle.policy.config.policy import TARGETS, LoraConfig

if TYPE_CHECKING:
    from treadle.policy.config.choices import BackendName
    from treadle.policy.config.policy import ParallelConfig, PolicyConfig


_BY_LENGTH: Final = frozenset(("dynamic", "longrope"))
_FUSED: Final[Mapping[str, Sequence[str]]] = {"qkv_proj": TARGETS[:3], "gate_up_proj": TARGETS[4:6]}

_COLUMNS: Final = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "moe_shared_expert_intermediate_size",
)
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NO_8BIT: Final = (
    "policy.optimizer.name=adamw8bit needs bitsandbytes: pip install 'treadle-policy[adamw8bit]'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpModel(ModelShape):
    """What the backend says of a model.

    Attributes:
        ffn_size: Columns of the feed-forward part, of all experts that a token goes to.
        num_experts: Experts of a layer that ranks can share; 0 of a dense model.
        split_by: Greatest common divisor of the heads and columns of which each tensor rank has
            equally many; 0 without a plan of transformers for these ranks.
        shapes: Shape of each tensor in the folder's files, by name; empty where there are none.
    """

    ffn_size: int
    num_experts: int
    split_by: int
    vision: VisionShape | None
    shapes: Mapping[str, Sequence[int]]

    @property
    def num_parameters(self) -> int:
        """Number of weights in the folder's files."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_tower_parameters(self) -> int:
        """Number of weights of the vision tower; 0 without one."""
        named = self.shapes.items()
        return sum(math.prod(shape) for name, shape in named if "visual" in name.split("."))

    @property
    def num_expert_parameters(self) -> int:
        """Number of weights of the experts between which tokens are spread."""
        named = self.shapes.items()
        return sum(math.prod(shape) for name, shape in named if "experts" in name.split("."))

    def adapted(self, lora: LoraConfig) -> Mapping[str, Sequence[Sequence[int]]]:
        """Returns the shapes of all matrices with an adapter, by their names in a layer.

        Raises:
            UnsupportedModelError: The model has none of a name.
        """
        found: dict[str, list[Sequence[int]]] = {}
        for name, shape in self.shapes.items():
            *rest, matrix, kind = ["", *name.split(".")]
            if kind == "weight" and len(shape) == 2 and not {"experts", "visual"} & {*rest}:
                found.setdefault(matrix, []).append(shape)
        fused = {name: parts for name, parts in _FUSED.items() if name in found}
        names = adapted_names(lora.targets, fused, self.model_type)
        if lacking := [name for name in names if self.shapes and name not in found]:
            there = ",".join(name for name in names if name in found)
            raise UnsupportedModelError(
                f"policy.lora.targets has {', '.join(lacking)}, of which model type "
                f"{self.model_type!r} has no matrix: set policy.lora.targets=[{there}]"
            )
        return {name: found.get(name, ()) for name in names}


class FsdpDescription(BackendDescription):
    """Reads config.json by transformers' own classes, which need no torch."""

    name: ClassVar[BackendName] = "fsdp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        parallel=frozenset({"data", "context", "expert", "replicas", "tensor"}),
        dtypes=("float32", "bfloat16"),
        optimizers=("adamw", "adamw8bit", "muon"),
        lora=True,
        critic=True,
        other_reference=True,
        offload=True,
        recompute=True,
    )
    model_types: Collection[str] = (*MODEL_TYPES, *NAMING)
    vision_types: Collection[str] = tuple(NAMING)

    def read_model(self, folder: Path) -> FsdpModel:
        """See `BackendDescription.read_model`."""
        from transformers import AutoConfig

        file = folder / "config.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no config.json; expected a Hugging Face model folder"
            )
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        if (why := REFUSED.get(model_type)) is not None:
            raise UnsupportedModelError(
                f"model type {model_type!r} is not supported by the fsdp backend: {why}"
            )
        if model_type not in self.model_types:
            raise UnsupportedModelError(
                f"model type {model_type!r} is not among those that the fsdp backend is tested with"
            )
        refuse_quantised(folder, but=DEQUANTISED)
        whole: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = whole.get_text_config()
        if found_ropes := {*_rope_types(getattr(config, "rope_parameters", None))} & _BY_LENGTH:
            raise UnsupportedModelError(
                f"rope_type={found_ropes.pop()!r} is not supported by the fsdp backend: positions "
                "depend on the longest sequence of a micro-batch"
            )

        def size(*names: str, default: int = 0) -> int:
            # Of one that differs by layer, transformers raises an error; the usual one will do.
            found = (vars(config).get(name) or getattr(config, name, None) for name in names)
            return next((int(value) for value in found if isinstance(value, int)), default)

        hidden = size("hidden_size", "d_model", "n_embd")
        heads = size("num_attention_heads", default=1)
        chosen = size("num_experts_per_tok") * size("moe_intermediate_size", "intermediate_size")
        kv_heads = size("num_key_value_heads", default=heads)
        shared = [heads, kv_heads, size("num_global_key_value_heads"), *map(size, _COLUMNS)]
        has_plan = bool(config.base_model_tp_plan) and model_type not in {*NOT_SPLIT, *NAMING}
        files = [] if missing_weights(folder) else weight_files(folder)
        return FsdpModel(
            model_type=model_type,
            num_layers=size("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size("head_dim", default=hidden // heads),
            vocab_size=size("vocab_size"),
            max_positions=size("max_position_embeddings", default=2**31),
            norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-5),
            tied=bool(getattr(whole, "tie_word_embeddings", False)),
            ffn_size=chosen or size("intermediate_size", default=4 * hidden),
            split_by=math.gcd(*shared) if has_plan else 0,
            num_experts=0 if model_type in OWN_EXPERTS else size(*EXPERTS),
            vision=VisionShape.from_config(whole),
            shapes=dict(_whole(chain.from_iterable(map(tensor_shapes, files)))),
        )

    def split_problems(self, model: FsdpModel, parallel: ParallelConfig) -> Iterator[str]:
        """See `BackendDescription.split_problems`; any number of ranks shards any model."""
        count = parallel.context
        if count > 1 and model.model_type not in {*SHARED, *NAMING}:
            yield (
                f"policy.parallel.context={count}: layers of {model.model_type!r} see other "
                "positions elsewhere than in attention over packed sequences; set "
                "policy.parallel.context=1"
            )
        elif model.num_heads % count:
            yield (
                f"policy.parallel.context={count} does not divide the {model.num_heads} attention "
                "heads, of which each rank has equally many"
            )
        count = parallel.expert
        if count > 1 and (not model.num_experts or model.num_experts % count):
            yield (
                f"policy.parallel.expert={count} does not divide the {model.num_experts} experts "
                f"of a layer of {model.model_type!r} that ranks can share"
            )
        yield from _tensor_problems(model, parallel)

    def training_problems(self, model: FsdpModel, policy: PolicyConfig) -> Iterator[str]:
        """See `BackendDescription.training_problems`."""
        if policy.moe.routing_replay or policy.moe.aux_loss_coef:
            yield (
                "policy.backend=fsdp has no policy.moe: leave it out, or set "
                "policy.backend=megatron"
            )
        if policy.parallel.tensor > 1:
            settings = {
                "policy.lora.rank": (policy.lora.rank, 0),
                "policy.optimizer.name": (policy.optimizer.name, "adamw"),
            }
            for name, (value, fix) in settings.items():
                if value not in (fix, "muon"):
                    yield (
                        f"policy.parallel.tensor={policy.parallel.tensor} with policy.backend=fsdp "
                        f"does not go with {name}={value}: set {name}={fix}, or "
                        "policy.parallel.tensor=1"
                    )
        if policy.recompute == "selective":
            yield (
                "policy.backend=fsdp has no policy.recompute=selective: set policy.recompute=full "
                "or none"
            )
        is_8bit = policy.optimizer.name == "adamw8bit" and not policy.command
        if is_8bit and find_spec("bitsandbytes") is None:
            yield NO_8BIT
        if policy.lora.rank:
            yield from raised(partial(model.adapted, policy.lora))

    def reference_problems(self, model: FsdpModel, reference: FsdpModel) -> Iterator[str]:
        """See `BackendDescription.reference_problems`."""
        types = model.model_type, reference.model_type
        return raised(partial(check_reference, types[0], model.vision, types[1], reference.vision))

    def adapters(self, model: FsdpModel, lora: LoraConfig) -> tuple[Sequence[str], int]:
        """See `BackendDescription.adapters`."""
        adapted = model.adapted(lora)
        return tuple(adapted), lora.rank * sum(map(sum, chain(*adapted.values())))

    def memory(
        self,
        model: FsdpModel,
        policy: PolicyConfig,
        *,
        rows: int,
        reference: bool = False,
        other_reference: FsdpModel | None = None,
    ) -> MemoryEstimate:
        """Returns an estimate of the usual blocks; see `BackendDescription.memory`.

        A rank has its share of the float32 weights, and of the gradients and Adam's moments of
        those that are trained; another optimizer keeps less for matrices of layers. One layer is
        whole at a time, or a tensor rank's part of it, with the rank's own experts. A layer keeps,
        per row, about 8 H + (5 F + 4 A) / tensor numbers, or with recomputation H, and one layer
        all of them. Of logits there are two copies, of which one is their gradient.
        """
        size = {"float32": 4, "bfloat16": 2}[policy.dtype]
        _, adapters = self.adapters(model, policy.lora) if policy.lora.rank else ((), 0)
        outside = (1 if model.tied else 2) * model.vocab_size * model.hidden_size
        outside += model.num_tower_parameters
        of_layers = 0 if adapters else max(0, model.num_parameters - outside)
        saved = {"adamw": 0, "adamw8bit": 6, "muon": 4}[policy.optimizer.name] * of_layers
        ranks = policy.parallel.num_ranks // policy.parallel.replicas
        rows = -(-rows // policy.parallel.context)
        own = 4 * (model.num_parameters + adapters) // ranks
        trained = 4 * adapters // ranks if adapters else own
        if not adapters and policy.freeze_vision_tower:
            trained -= 4 * model.num_tower_parameters // ranks
        # New adapters are switched off for the reference, which needs no copy.
        is_bare = other_reference is None and adapters and policy.lora.path is None
        copied = 0 if is_bare else reference * trained
        if other_reference is not None:
            copied = reference * 4 * other_reference.num_parameters // ranks
        tensor = policy.parallel.tensor
        split = (5 * model.ffn_size + 4 * model.num_heads * model.head_dim) // tensor
        layer = size * rows * (8 * model.hidden_size + split)
        kept = model.num_layers * layer
        if policy.recompute == "full":
            kept = model.num_layers * size * rows * model.hidden_size + layer
        whole = 0
        if ranks > 1 or policy.dtype == "bfloat16":
            experts, shared_by = model.num_expert_parameters, policy.parallel.expert
            gathered = model.num_parameters - experts + experts // shared_by
            whole = 2 * size * gathered // max(1, model.num_layers) // tensor
        logits = 2 * size * min(rows, policy.logits_chunk_tokens) * model.vocab_size
        return MemoryEstimate(
            weights=own,
            gradients=trained,
            optimizer=2 * trained - saved // ranks,
            reference=copied,
            activations=kept + whole + logits,
            exchanged=0 if other_reference else copied,
        )

    def critic_memory(self, model: FsdpModel, policy: PolicyConfig, *, rows: int) -> MemoryEstimate:
        """See `BackendDescription.critic_memory`."""
        return self.memory(model, policy.model_copy(update={"lora": LoraConfig()}), rows=rows)


def _tensor_problems(model: FsdpModel, parallel: ParallelConfig) -> Iterator[str]:
    count = parallel.tensor
    if count == 1:
        return
    given = f"policy.parallel.tensor={count} with policy.backend=fsdp"
    if model.vision is not None:
        yield f"{given}: models that see are not split; set policy.parallel.tensor=1"
    elif not model.split_by:
        yield (
            f"{given}: transformers has no plan for {model.model_type!r} by which ranks that share "
            "its matrices compute what one does; set policy.parallel.tensor=1"
        )
    elif model.split_by % count:
        yield (
            f"{given} does not divide the heads, key-value heads and feed-forward columns of the "
            f"model, whose greatest common divisor is {model.split_by}"
        )
    for name, is_set in (
        ("context", parallel.context > 1),
        ("expert", parallel.expert > 1),
        ("sequence", parallel.sequence),
    ):
        if is_set:
            value = getattr(parallel, name)
            yield (
                f"{given} does not go with policy.parallel.{name}={str(value).lower()}: leave one "
                "of them out"
            )


def _whole(stored: Iterable[tuple[str, list[int]]]) -> Iterator[tuple[str, list[int]]]:
    """Yields the shapes of weights, which may be stored in blocks of two to a byte, and scales."""
    for name, shape in stored:
        if name.endswith("_blocks"):
            yield name.removesuffix("_blocks"), [*shape[:-1], 2 * shape[-1]]
        elif not name.endswith(("_scales", "_scale_inv")):
            yield name, shape


def _rope_types(parameters: Any) -> Iterator[str]:
    """Yields the kinds of rotary positions, which may differ by kind of layer."""
    if isinstance(parameters, dict):
        yield str(parameters.get("rope_type"))
        for part in parameters.values():
            yield from _rope_types(part)
