"""The parallel world: this process's position among the policy's ranks.

`start` is collective over all ranks: it joins the process group and returns when every rank has.
A process has one world at a time; `World.close` ends it. The backend is NCCL with one GPU per rank
with CUDA, else gloo. Environment variables are not read: whatever starts a rank passes the
rendezvous.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from treadle.policy.backend import Frame, Rendezvous
from treadle.policy.backends.megatron import device
from treadle.policy.backends.ranks import join, share, siblings_of

device.install()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402

if TYPE_CHECKING:
    from treadle.policy.config.policy import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the ranks of a pipeline stage share one matrix.

    Attributes:
        group: The ranks with the other parts; None if the matrix is whole.
        copy: Which of the copies of its part, over context and data ranks, this rank has.
    """

    ranks: int
    rank: int
    group: dist.ProcessGroup | None
    copy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The groups that this rank belongs to, as sizes and positions."""

    rank: int
    size: int
    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    context: int
    context_rank: int
    data: int
    data_rank: int
    sequence_parallel: bool
    expert: int = 1
    expert_rank: int = 0
    expert_data_rank: int = 0
    """Which copy of its experts this rank has."""
    siblings: dist.ProcessGroup | None = None
    """The ranks that compute the same sequences, on the host's network; None: this one alone."""

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline_rank == self.pipeline - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank reports for its tensor and context groups, which hold equal results."""
        return self.is_last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its siblings, which the driver gives their shard."""
        return self.is_first_stage and self.tensor_rank == 0 and self.context_rank == 0

    def share(self, frame: Frame | None) -> Frame:
        """Returns what the leading rank gives; collective over the siblings.

        Args:
            frame: The leader's bytes; None on the others.
        """
        return share(frame, self.siblings)

    @property
    def copies(self) -> int:
        """Number of ranks with the same part of the model, which share the optimizer's state."""
        return self.context * self.data

    @property
    def tensor_group(self) -> dist.ProcessGroup | None:
        """The group that shares each layer, None if this rank has whole layers."""
        if self.tensor == 1:
            return None
        group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        return group

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The group that shares the rows of a micro-batch, None if this rank has all of them."""
        if self.context == 1:
            return None
        group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        return group

    def split(self, *, expert: bool) -> Split:
        """Returns how a matrix is cut over ranks: one of an expert, or any other."""
        if expert:
            return Split(ranks=1, rank=0, group=None, copy=self.expert_data_rank)
        return Split(
            ranks=self.tensor,
            rank=self.tensor_rank,
            group=self.tensor_group,
            copy=self.context_rank + self.context * self.data_rank,
        )

    @property
    def expert_places(self) -> list[tuple[int, int]]:
        """Which experts the ranks of this tensor group have: expert-parallel rank, and copy."""
        first = self.expert_data_rank * self.expert + self.expert_rank - self.tensor_rank
        places = (divmod(first + rank, self.expert) for rank in range(self.tensor))
        return [(expert_rank, copy) for copy, expert_rank in places]

    def close(self) -> None:
        """Leaves the process group. Ranks that still compute together will fail."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def start(parallel: ParallelConfig, rendezvous: Rendezvous, *, seed: int = 0) -> World:
    """Joins the other ranks.

    Raises:
        ValueError: The rendezvous is for another number of ranks than `parallel` makes.
        RuntimeError: A world is already up in this process.
    """
    # Groups of a world that ended are in reference cycles of its model. Each has threads of gloo,
    # which wake for every connection that ends: hundreds, where a process has had many worlds.
    gc.collect()
    join(parallel, rendezvous)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=rendezvous.timeout_s / 60,
        create_gloo_process_groups=False,  # for Megatron's memory-saving checkpoints, unused here
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    data_rank = parallel_state.get_data_parallel_rank()
    assert data_rank == parallel.data_rank(dist.get_rank()), "the driver counts alike"
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        tensor=parallel.tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel.pipeline,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel.context,
        context_rank=parallel_state.get_context_parallel_rank(),
        data=parallel.data,
        data_rank=data_rank,
        sequence_parallel=parallel.sequence,
        expert=parallel.expert,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_data_rank=parallel_state.get_expert_data_parallel_rank(),
        siblings=siblings_of(parallel, timedelta(seconds=rendezvous.timeout_s)),
    )
