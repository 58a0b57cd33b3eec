"""Plans the micro-batches of a rank: which sequences, in which packs, beside which prefixes.

The policy and its critic have one planner, so that both see the same micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.context.rows import row_multiple
from treadle.policy.backends.megatron.experts import plan as experts_plan
from treadle.policy.backends.megatron.packing import MicroBatches, Packer
from treadle.policy.client import prefixes
from treadle.policy.client.batch import balance, input_length, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.megatron.parallel import World
    from treadle.policy.backends.vision.rows import ImagePacker
    from treadle.policy.client.types import TrainSequence
    from treadle.policy.config.policy import PolicyConfig


class Planner:
    """The plan of each batch on one rank.

    Attributes:
        share_prefixes: The configured mode; may be changed between steps.
    """

    def __init__(
        self,
        config: PolicyConfig,
        world: World,
        architecture: Architecture,
        images: ImagePacker | None,
    ) -> None:
        """Args are those of the policy; `images` is None for a model that reads text only."""
        self.share_prefixes = config.share_prefixes
        self._world, self._architecture, self._images = world, architecture, images
        # Context ranks have equal shares of a micro-batch.
        self._max_tokens = config.micro_batch_tokens * world.context

    def plan(
        self,
        sequences: Sequence[TrainSequence],
        of_tokens: Sequence[float],
        computed: Sequence[int],
        *,
        plain_attention: bool,
        replays_experts: bool = False,
    ) -> MicroBatches:
        """Returns this data-parallel rank's share of a batch; may be empty.

        Args:
            of_tokens: Weight of a loss token per sequence.
            computed: Indices of those that go through the model.
            plain_attention: Whether the model can share the rows of common prefixes.
        """
        world = self._world
        packer = Packer(
            sequences,
            of_tokens,
            at=device.device(),
            row_multiple=row_multiple(
                world.context, world.tensor if world.sequence_parallel else 1
            ),
            context=world.context_group,
            replaying=self._architecture if replays_experts else None,
            images=self._images,
        )
        mine = MicroBatches(packer, self._parts(sequences, computed, can_share=plain_attention))
        if self._architecture.experts is None or not computed:
            return mine
        return experts_plan.prepare(mine, world)

    def _parts(
        self, sequences: Sequence[TrainSequence], computed: Sequence[int], *, can_share: bool
    ) -> list[tuple[Sequence[int], Sequence[int] | None]]:
        mode = prefixes.mode_on(self.share_prefixes, cpu=device.device().type == "cpu")
        num_shards, shard = self._world.data, self._world.data_rank
        if sequences and sequences[0].shard is not None:  # then the driver has chosen
            computed = [i for i in computed if sequences[i].shard == shard]
            num_shards, shard = 1, 0
        ordered = prefixes.shared(sequences, computed, mode if can_share else "never")
        if ordered is not None:
            parts = prefixes.micro_batches(
                ordered,
                num_shards=num_shards,
                shard=shard,
                max_tokens=self._max_tokens,
                at_least=self._world.pipeline,
            )
            return [(part.indices, part.overlaps) for part in parts]
        lengths = [input_length(sequences[i]) for i in computed]
        share = balance(lengths, num_shards)[shard]
        packs = pack(
            [lengths[i] for i in share],
            max_tokens=self._max_tokens,
            at_least=self._world.pipeline,
        )
        return [([computed[share[i]] for i in members], None) for members in packs]
