"""The policy's settings: parallel sizes, optimizer, precision and memory.

Invariant: settings that cannot work together are rejected here, except those that depend on the
model's sizes, which `treadle.policy.backends.megatron.model` checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from treadle.policy.config.choices import BackendName, ElementType, OptimizerName, SharePrefixes


class ParallelConfig(BaseModel):
    """How the policy is spread over tensor x pipeline x context x data processes."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tensor: int = Field(default=1, ge=1)
    """Number of processes that share each layer's matrices. Must divide the numbers of attention
    and key-value heads."""
    pipeline: int = Field(default=1, ge=1)
    """Number of pipeline stages that share the layers, in order. Must divide the number of
    layers."""
    context: int = Field(default=1, ge=1)
    """Number of processes that share the tokens of each micro-batch, so that a sequence may be
    longer than one process has memory for. Each has the same weights; above 1, the optimizer state
    is sharded over them."""
    data: int = Field(default=1, ge=1)
    """Number of copies of the model, each computing a share of the sequences. Above 1, the
    optimizer state is sharded over the copies."""
    sequence: bool = False
    """Sequence parallelism: split activations between the tensor-parallel processes along the
    sequence, to save memory. Needs `tensor` above 1."""
    expert: int = Field(default=1, ge=1)
    """Number of processes that share the experts of a layer, each having some of them, whole. They
    are among the tensor x context x data processes of a pipeline stage, not further ones. Must
    divide that number and the number of experts."""
    replicas: int = Field(default=1, ge=1)
    """Number of groups of processes that hold the model whole, each process of a group a share of
    weights, gradients and optimizer state (hybrid sharding). Weights are gathered within a group,
    whose processes are neighbours, and gradients are summed over the groups. They are made of the
    context x data processes: must divide that number. Above 1 it needs policy.backend=fsdp."""

    @property
    def num_ranks(self) -> int:
        """Total number of processes."""
        return self.tensor * self.pipeline * self.context * self.data

    def data_rank(self, rank: int) -> int:
        """Returns which data-parallel group a process belongs to, in Megatron's order of them."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def sizes(self) -> str:
        """The sizes whose product is that, for people."""
        return (
            f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} x "
            f"data {self.data}"
        )

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor above 1, but tensor is 1")
        return self

    @model_validator(mode="after")
    def _replicas_have_ranks(self) -> Self:
        shared = self.context * self.data
        if shared % self.replicas:
            raise ValueError(
                f"replicas={self.replicas} does not divide context={self.context} x "
                f"data={self.data}: the replicas of the model are made of these processes"
            )
        if self.replicas > 1 and shared // self.replicas % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide the {shared // self.replicas} processes of "
                f"each of the replicas={self.replicas}: a replica has all experts"
            )
        return self

    @model_validator(mode="after")
    def _experts_have_ranks(self) -> Self:
        if self.tensor * self.context * self.data % self.expert:
            raise ValueError(
                f"expert={self.expert} does not divide tensor={self.tensor} x "
                f"context={self.context} x data={self.data}: the experts of a layer are spread "
                "over the processes of its pipeline stage"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """AdamW's settings in one optimizer step.

    Attributes:
        weight_decay: Decay of matrices; biases and norms are not decayed.
        grad_clip: Maximum norm of the gradient; infinite: it is not clipped.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float


class OptimizerConfig(BaseModel):
    """The optimizer with decoupled weight decay, and the learning rate over steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: OptimizerName = "adamw"
    """Step of the matrices of layers; embeddings, output layer, norms and biases have AdamW's.
    adamw8bit: AdamW whose moments have 8 bits, bitsandbytes'. muon: steps of about equal size in
    all directions, torch's, scaled to AdamW's (arXiv:2502.16982). Others than adamw need
    policy.backend=fsdp."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer steps over which the learning rate rises linearly from lr / warmup_steps
    to lr. A training step has algorithm.epochs x algorithm.mini_batches optimizer steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps, including warm-up, after which the learning rate stays at
    `min_lr`. Required unless the schedule is constant."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Weight decay of matrices; biases and norms are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Muon's momentum."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Maximum norm of the gradient over all parameters; a larger gradient is scaled down."""

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of optimizer step `step`, the first being 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        assert self.decay_steps is not None  # other schedules without it are refused
        span = self.decay_steps - self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / span)
        remaining = 1.0 - progress
        if self.schedule == "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr + (self.lr - self.min_lr) * remaining

    def at_step(self, step: int) -> AdamSettings:
        """Returns the settings of optimizer step `step`, the first being 0."""
        return AdamSettings(
            lr=self.learning_rate(step),
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
        )

    @model_validator(mode="after")
    def _schedule_is_complete(self) -> Self:
        if self.schedule == "constant":
            if self.decay_steps is not None or self.min_lr:
                raise ValueError(
                    "decay_steps and min_lr apply to schedule=linear|cosine, not to constant"
                )
        elif self.decay_steps is None:
            raise ValueError(f"schedule={self.schedule} needs decay_steps")
        elif self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps={self.decay_steps} must be above warmup_steps={self.warmup_steps}"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        return self


RecomputeModule = Literal["core_attn", "mlp"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: Final[tuple[LoraTarget, ...]] = get_args(LoraTarget)
"""The matrices of a layer under their Hugging Face names, in the order of a layer."""


class LoraConfig(BaseModel):
    """Adapters of low rank (LoRA): h = W x + (alpha / rank) B A x, where only A and B are trained.

    Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    rank: int = Field(default=0, ge=0)
    """Rank of the adapters: A is [rank, inputs], B is [outputs, rank]. 0: no adapters, all weights
    are trained."""
    alpha: float = Field(default=16.0, gt=0)
    """The adapters' output is multiplied by alpha / rank."""
    targets: tuple[LoraTarget, ...] = Field(default=TARGETS, min_length=1)
    """Matrices with an adapter, in every layer."""
    path: Path | None = None
    """Adapter to start from, a directory in PEFT's format, of this rank, alpha and these targets.
    Null: A is random and B is 0, so that training starts from the model itself."""

    @property
    def scaling(self) -> float:
        """The factor of the adapters' output."""
        return self.alpha / self.rank

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.path is not None and not self.rank:
            raise ValueError(f"path={self.path} needs the rank of that adapter, but rank is 0")
        if twice := sorted({name for name in self.targets if self.targets.count(name) > 1}):
            raise ValueError(f"targets has {twice[0]} twice")
        return self


class MoeConfig(BaseModel):
    """Training of a mixture-of-experts model; a dense model has nothing to set here."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss, which keeps tokens from going to a few experts only: the
    loss of Switch Transformers (arXiv:2101.03961), summed over layers. 0: none, as is usual in
    reinforcement learning. `router_aux_loss_coef` of the model's config.json is not read."""
    routing_replay: bool = False
    """Send each token to the experts that the rollout engine chose for it, in the log-probabilities
    and in the update (R3, arXiv:2510.11370). The engine must report them: torch, vllm and sglang
    do. The reference chooses its own."""


class OffloadConfig(BaseModel):
    """What is in host memory while nothing is computed with it, so that others use the device."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    parameters: bool = False
    """Take the weights off the device between the policy's phases (log-probabilities, training,
    weight sync, checkpoint), and the gradients' memory with them. Policy and critic are then on the
    device in turn, and neither while servers sample."""
    optimizer: bool = False
    """Have the optimizer's state (Adam's moments, and the float32 weights of a bfloat16 model) on
    the device only while the optimizer steps and while a checkpoint is written or read."""
    reference: bool = False
    """Keep the reference of the KL penalties in host memory: the starting weights always, another
    model (algorithm.reference_path) except while it computes."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts that leave the device."""
        return tuple(name for name, on in self if on)


class ProfileConfig(BaseModel):
    """A profile of some updates by torch's profiler, as Chrome traces, one per update and rank."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    first_step: int | None = Field(default=None, ge=1)
    """Optimizer step of the policy from which on updates are profiled, the first being 1. The first
    ones of a process also make what stays. Null: none is."""
    num_steps: int = Field(default=1, ge=1)
    """Number of optimizer steps; an update that begins with one of them is profiled whole. A trace
    of an update of a large model has some hundred megabytes before it is compressed."""
    directory: Path | None = None
    """Directory of the traces, on the machine of each rank. Null: profiles in the run directory."""

    def covers(self, step: int) -> bool:
        """Returns whether an update whose first optimizer step is this one is profiled."""
        return (
            self.first_step is not None
            and self.first_step <= step < self.first_step + self.num_steps
        )


class PolicyConfig(BaseModel):
    """The policy that is trained: its layout over processes, precision, memory and optimizer."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    backend: BackendName = "megatron"
    """What computes the policy. megatron: Megatron-core. fsdp: transformers' own modules, sharded
    by torch's FSDP2. fake: a model without its layers, in one process, for trying out everything
    around a policy; it starts in a moment and learns little. Where it is not set, a run takes
    megatron if that computes the type of the model and is installed, else fsdp; --dry-run prints
    which, and why."""
    command: tuple[str, ...] = ()
    """Program and leading arguments that start a rank in an environment of its own, with another
    Python and another torch, such as /opt/policy/bin/treadle-policy-rank; the rank does not see the
    trainer's Python. With Ray it must be on every node. Empty: the trainer's interpreter."""
    parallel: ParallelConfig = ParallelConfig()
    """Number of processes, and how they share the model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and its learning rate."""
    lora: LoraConfig = LoraConfig()
    """Train adapters of low rank and leave the model's weights as they are."""
    moe: MoeConfig = MoeConfig()
    """Training of the experts of a mixture-of-experts model."""
    freeze_vision_tower: bool = True
    """Whether the vision tower of a model that sees stays as it is. false: it is trained like the
    rest of the model. With adapters it always stays."""
    dtype: ElementType = "float32"
    """Number format of parameters and activations. With bfloat16 the optimizer keeps a float32
    copy, and gradients are summed in float32."""
    micro_batch_tokens: int = Field(default=8192, ge=2)
    """Maximum number of tokens per forward pass on one rank, those of a shared prefix counted once;
    bounds activation memory. A micro-batch has at most this number times `parallel.context`, and a
    longer sequence is its own."""
    share_prefixes: SharePrefixes = "auto"
    """Whether sequences of a micro-batch that begin alike, as those of a group do, go through the
    model once as far as they are alike. always: wherever two of them begin alike. auto: where it
    saves at least 10 % of the tokens, and not on a GPU, where it is not measured."""
    logits_chunk_tokens: int = Field(default=4096, ge=1)
    """Number of tokens whose logits exist at a time; bounds their memory to this number times the
    vocabulary."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation. selective: run `recompute_modules` again in the backward pass
    instead of keeping what they computed. full: keep only each layer's input, and run the layer
    again."""
    recompute_modules: tuple[RecomputeModule, ...] = Field(default=("core_attn",), min_length=1)
    """What recompute=selective runs again, as Megatron names it. core_attn: the attention between
    its projections. mlp: the feed-forward part, which keeps the most."""
    offload: OffloadConfig = OffloadConfig()
    """What of the policy, and of its critic, is in host memory between its phases."""
    profile: ProfileConfig = ProfileConfig()
    """Updates that are profiled."""
    unresponsive_s: float = Field(default=300.0, gt=0)
    """A rank at work gives a sign of life every second. One that gives none for this time, because
    its process or its machine stands still, is dead: the run ends and names it."""
    collective_timeout_s: float = Field(default=600.0, gt=0)
    """Maximum time that a rank waits for the others in one operation (NCCL's or Gloo's); then the
    run ends. Ranks that wait for each other forever give signs of life too."""
    seed: int = Field(default=0, ge=0)
    """Seed of Megatron's random generators. Dropout is off, so nothing draws from them."""

    @model_validator(mode="after")
    def _adapters_leave_the_tower(self) -> Self:
        if self.lora.rank and not self.freeze_vision_tower:
            raise ValueError(
                f"freeze_vision_tower=false with lora.rank={self.lora.rank}: only the adapters are "
                "trained, and the vision tower has none; set it to true"
            )
        return self
