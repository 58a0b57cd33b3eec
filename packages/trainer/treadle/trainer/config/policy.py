"""The policy's settings: parallel sizes, optimizer, precision and memory.

Invariant: a value of these models can be trained with; what cannot work together is refused here,
except what depends on the model's own sizes, which `treadle.trainer.policy.megatron.model` checks.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from treadle.trainer.policy.types import ElementType


class ParallelConfig(BaseModel):
    """How the policy is spread over processes: tensor x pipeline x data of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tensor: int = Field(default=1, ge=1)
    """Processes that share each layer's matrices. Must divide the attention and key-value heads."""
    pipeline: int = Field(default=1, ge=1)
    """Processes that share the layers, in order. Must divide the number of layers."""
    data: int = Field(default=1, ge=1)
    """Copies of the model, each on its share of the sequences. Above 1 the optimizer state is
    spread over the copies."""
    sequence: bool = False
    """Split activations between the tensor-parallel processes along the sequence; saves memory.
    Needs `tensor` above 1."""

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return self.tensor * self.pipeline * self.data

    @model_validator(mode="after")
    def _sequence_needs_tensor(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor above 1, but tensor is 1")
        return self


class OptimizerConfig(BaseModel):
    """AdamW with decoupled weight decay, and the learning rate over steps."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from lr / warmup_steps to lr. A
    training step makes algorithm.epochs x algorithm.mini_batches of them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after warm-up."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, warm-up included, after which the learning rate has reached `min_lr` and
    stays. Required unless the schedule is constant."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of a linear or cosine schedule."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Applied to matrices; biases and norms are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of Adam's second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest norm of the gradient of all parameters together; larger ones are scaled down."""

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


class PolicyConfig(BaseModel):
    """Everything the policy backend needs besides the model folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    parallel: ParallelConfig = ParallelConfig()
    """Processes and how they share the model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its learning rate."""
    dtype: ElementType = "float32"
    """Of parameters and activations. With bfloat16 the optimizer keeps a float32 copy, and
    gradients are summed in float32."""
    micro_batch_tokens: int = Field(default=8192, ge=2)
    """Tokens that go through the model at a time on one rank; bounds activation memory. A longer
    sequence is a micro-batch of its own."""
    logits_chunk_tokens: int = Field(default=4096, ge=1)
    """Tokens whose logits exist at a time; bounds their memory to this times the vocabulary."""
    recompute: Literal["none", "full"] = "none"
    """full: keep only each layer's input and run the layer again in the backward pass."""
    seed: int = Field(default=0, ge=0)
    """Of Megatron's generators. Dropout is off, so today nothing draws from them."""
