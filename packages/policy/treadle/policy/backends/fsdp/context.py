"""Positions of a micro-batch that ranks share, and the exchange around attention.

A rank has an equal run of the positions of a packed row, with all heads. Around attention it has
all positions, with an equal share of the heads, which is Ulysses (arXiv:2309.14509): one exchange
before, one after. No rank has more work than another, however long the sequences are.

Shape suffixes: H heads, G those of a rank, K key-value heads, P positions, R those of a rank,
D head; T loss tokens, M those whose predictors are among this rank's positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import compress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from treadle.policy.backends.fsdp.exchange import exchanged
from treadle.policy.backends.loss_tokens import LossTokens
from treadle.policy.backends.ranks import device, siblings_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from treadle.policy.backend import Rendezvous
    from treadle.policy.backends.fsdp.batches import MicroBatch
    from treadle.policy.config.policy import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """This rank's place among those that share the positions; alone by default.

    Attributes:
        group: These ranks, where the model computes; None: this one alone.
        siblings: The same ranks, on the host's network.
        shards: Number of such groups, each of which has a shard of the sequences.
        shard: Which of them this is.
    """

    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = None
    siblings: ProcessGroup | None = None
    shards: int = 1
    shard: int = 0

    @staticmethod
    def joined(parallel: ParallelConfig, rendezvous: Rendezvous) -> Context:
        """Returns the place of this rank, whose world is up; collective."""
        size, shards = parallel.context, parallel.data
        shard, rank = divmod(dist.get_rank(), size * parallel.tensor)
        siblings = siblings_of(parallel, timedelta(seconds=rendezvous.timeout_s))
        group = None
        if size > 1:
            mesh = init_device_mesh(
                device().type, (shards, size), mesh_dim_names=("data", "context")
            )
            group = mesh.get_group("context")
        return Context(
            size=size, rank=rank, group=group, siblings=siblings, shards=shards, shard=shard
        )

    @property
    def leads(self) -> bool:
        """Whether this rank reports what all of its group have."""
        return self.rank == 0

    def part(self, whole_XP: Tensor) -> Tensor:
        """Returns this rank's run of positions, which are the last dimension."""
        return whole_XP.chunk(self.size, -1)[self.rank]

    def own_tokens(self, micro: MicroBatch) -> OwnTokens:
        """Returns the loss tokens of a micro-batch that this rank computes."""
        if self.group is None:
            return OwnTokens(micro.predictors_T, micro.targets_T, micro.sampling_masks, None)
        own = micro.ids_BP.shape[1] // self.size
        is_own_T = micro.predictors_T // own == self.rank
        (index_M,) = is_own_T.nonzero(as_tuple=True)
        return OwnTokens(
            micro.predictors_T[index_M] - own * self.rank,
            micro.targets_T[index_M],
            [*compress(micro.sampling_masks, is_own_T.tolist())],
            LossTokens(group=self.group, count=len(is_own_T), index_K=index_M),
        )

    def of_heads(self, *of_positions: Tensor) -> tuple[Tensor, ...]:
        """Returns queries, keys and values [1, G, P, D] of all positions; collective.

        Args:
            of_positions: [1, H, R, D], and [1, K, R, D] of keys and values.

        Raises:
            ValueError: The ranks cannot have equally many heads.
        """
        heads = of_positions[0].shape[1]
        if heads % self.size:
            raise ValueError(f"{heads} attention heads are not shared by {self.size} ranks")
        found = []
        for own_1HRD in of_positions:
            if own_1HRD.shape[1] % self.size:  # fewer key-value heads: each rank has copies
                own_1HRD = own_1HRD.repeat_interleave(heads // own_1HRD.shape[1], 1)
            blocks_CGRD = own_1HRD[0].unflatten(0, (self.size, -1))
            found.append(self._exchanged(blocks_CGRD).transpose(0, 1).flatten(1, 2)[None])
        return tuple(found)

    def of_positions(self, own_1GPD: Tensor) -> Tensor:
        """Returns [1, H, R, D]: all heads of this rank's positions; collective."""
        blocks_CGRD = own_1GPD[0].unflatten(1, (self.size, -1)).transpose(0, 1)
        return self._exchanged(blocks_CGRD).flatten(0, 1)[None]

    def gathered(self, own_RX: Tensor) -> Tensor:
        """Returns [P, X], without a gradient; collective over the siblings, on the host."""
        parts = [torch.empty_like(own_RX) for _ in range(self.size)]
        dist.all_gather(parts, own_RX.contiguous(), group=self.siblings)
        return torch.cat(parts)

    def _exchanged(self, blocks: Tensor) -> Tensor:
        # Before the model is on its device, it is tried on the host.
        group = self.group if blocks.device == device() else self.siblings
        assert group is not None
        return exchanged(blocks, group)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """The loss tokens that a rank computes; without `tokens` these are all."""

    predictors_M: Tensor
    targets_M: Tensor
    masks: Sequence[bytes]
    tokens: LossTokens | None

    def of_all_ranks(self, values_M: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Returns the [T] values of all ranks; collective over the context group."""
        return values_M if self.tokens is None else self.tokens.of_all_ranks(values_M)
