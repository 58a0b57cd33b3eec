"""The micro-batch: sequences packed end to end, as the tensors that one forward pass needs.

Invariant: rows are inputs, and each loss token is named by the row that predicts it; the shift
between the two happens only here. Rows after a sequence's last loss token are omitted, as nothing
depends on them. The prefix that a sequence shares with the one before it may be left out too
(`prefixes/`); its loss tokens then name rows of that sequence, which go to that one's experts. With
context parallelism a rank holds its share of the rows, but the tensors of all loss tokens
(`context/`).

Shape suffixes: P packed rows of this rank, T loss tokens, K those that its rows predict, S samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from treadle.policy.backends.loss_batch import LossBatch, MicroBatchTokens
from treadle.policy.backends.loss_tokens import LossTokens
from treadle.policy.backends.megatron.attention import Segments, take_rows
from treadle.policy.backends.megatron.context.attention import ContextSegments
from treadle.policy.backends.megatron.context.rows import rows_of_ranks
from treadle.policy.backends.megatron.experts.routing import Routing, replayed_indices
from treadle.policy.backends.megatron.prefixes.attention import TreeSegments
from treadle.policy.backends.megatron.prefixes.tree import rows_of_paths, runs_of
from treadle.policy.backends.ranks import to_device
from treadle.policy.client.batch import input_length
from treadle.policy.client.types import LOGPROB_FIELDS, TrainSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.distributed import ProcessGroup

    from treadle.policy.backends.megatron.architecture import Architecture
    from treadle.policy.backends.vision.rows import ImagePacker


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(MicroBatchTokens):
    """The input of one forward pass on one rank."""

    ids_1P: Tensor
    positions_P: Tensor
    """[3, P] of a model that sees."""
    segments: Segments
    predictors_K: Tensor
    """The row that predicts each loss token; see `at_predictors`."""
    shared: bool
    """Whether a row may predict loss tokens of several sequences."""
    targets_K: Tensor
    spread: LossTokens | None
    """With context parallelism the loss tokens that are predicted here; None: all."""

    @property
    def num_rows(self) -> int:
        """Packed rows of all context ranks, padding included."""
        return self.ids_1P.shape[1] * (self.spread.group.size() if self.spread else 1)

    def at_predictors(self, x_PH: Tensor) -> Tensor:
        """Returns the [K, H] rows that predict the loss tokens."""
        if self.shared:
            return x_PH.index_select(0, self.predictors_K)
        return take_rows(x_PH, self.predictors_K)

    def of_all_tokens(self, *values_K: Tensor) -> tuple[Tensor, ...]:
        """Returns the [T] values of all loss tokens; collective over the context group."""
        return values_K if self.spread is None else self.spread.of_all_ranks(values_K)


class Packer(LossBatch):
    """Builds the micro-batches of one batch."""

    def __init__(
        self,
        sequences: Sequence[TrainSequence],
        weights: Sequence[float],
        *,
        at: torch.device,
        row_multiple: int = 1,
        context: ProcessGroup | None = None,
        replaying: Architecture | None = None,
        images: ImagePacker | None = None,
    ) -> None:
        """Takes the whole batch and its token weights.

        Args:
            sequences: All sequences; slots are numbered in this order.
            weights: Weight of a loss token per sequence.
            row_multiple: Sequence parallelism needs rows divisible by the tensor-parallel size, and
                context parallelism equal blocks of rows.
            context: The context group; None if this rank has all rows.
            replaying: The model, if its routers replay the sequences' experts; None: they choose.
            images: Finds the images of a model that sees; None: it reads text only.

        Raises:
            ValueError: See `LossBatch`; or some have images, and the model reads text only.
        """
        if images is None and any(sequence.images for sequence in sequences):
            raise ValueError("sequences have images, and the model has no vision tower")
        super().__init__(sequences, weights, at=at)
        self._row_multiple = row_multiple
        self._context = context
        self._replaying = replaying
        self._images = images
        if images is not None:
            images.start_batch()

    def num_rows(self, indices: Sequence[int], overlaps: Sequence[int] | None = None) -> int:
        """Returns the rows of `micro_batch` for these arguments, without padding."""
        return sum(input_length(self.sequences[i]) for i in indices) - sum(overlaps or ())

    def micro_batch(
        self, indices: Sequence[int], overlaps: Sequence[int] | None = None
    ) -> MicroBatch:
        """Packs some sequences, in the order given.

        Args:
            indices: Which sequences; of ascending length if nothing is shared, else in the order of
                their ids.
            overlaps: How many first ids of each have their rows in the one before it, see
                `prefixes.tree`; None: nothing is shared.

        Raises:
            RuntimeError: Another data-parallel group has the values of a sequence.
        """
        chosen = [(self.sequences[i], self._positions[i]) for i in indices]
        loss_tokens = self.loss_tokens(indices)
        lengths = [input_length(sequence) for sequence, _ in chosen]
        skipped = [0] * len(lengths) if overlaps is None else overlaps
        own = [range(o, n) for o, n in zip(skipped, lengths, strict=True)]
        positions = list(chain.from_iterable(own))
        ids: list[int] = []
        for (s, _), ts in zip(chosen, own, strict=True):
            ids += s.ids.data[ts.start : ts.stop].tolist()
        padding = [0] * (-len(ids) % self._row_multiple)
        real = [True] * len(ids) + [False] * len(padding)
        ids, positions = ids + padding, positions + padding
        rotary = self._rotary(chosen, own, positions)
        rows: list[int] = []
        targets: list[int] = []
        for path, (s, where) in zip(rows_of_paths(lengths, skipped), chosen, strict=True):
            rows += np.asarray(path, dtype=np.int64)[where - 1].tolist()
            targets += np.asarray(s.ids)[where].tolist()
        indices_PLK = self._replayed(chosen, own, len(padding))
        segments: Segments
        spread = None
        if self._context is not None:
            parts = rows_of_ranks(positions, self._context.size())
            mine = list(chain.from_iterable(parts[self._context.rank()]))
            segments = ContextSegments.of_runs(
                runs_of(lengths, skipped), parts, self._context, self._at
            )
            place = {row: number for number, row in enumerate(mine)}
            index = [token for token, row in enumerate(rows) if row in place]
            spread = LossTokens(
                group=self._context,
                count=len(rows),
                index_K=to_device(np.array(index, np.int64), self._at),
            )
            ids = [ids[row] for row in mine]
            rotary = rotary[..., mine]
            real = [real[row] for row in mine]
            indices_PLK = None if indices_PLK is None else indices_PLK[mine]
            rows, targets = [place[rows[t]] for t in index], [targets[t] for t in index]
            if masks := loss_tokens["sampling_masks"]:
                loss_tokens["sampling_masks"] = [masks[t] for t in index]
        elif overlaps is None:
            segments = Segments.of_lengths(lengths, self._at)
        else:
            segments = TreeSegments.of_tree(lengths, overlaps, self._at)
        if self._images is not None:
            places = None if self._context is None else place
            segments.images = self._images.rows([s for s, _ in chosen], own, places, self._at)
        segments.routing = Routing(
            num_rows=self.num_rows(indices, overlaps),
            real_P=to_device(np.array(real, np.bool_), self._at) if padding else None,
            indices_PLK=indices_PLK,
        )
        return MicroBatch(
            ids_1P=to_device(np.array(ids, np.int64), self._at)[None],
            positions_P=to_device(rotary, self._at),
            segments=segments,
            shared=overlaps is not None,
            predictors_K=to_device(np.array(rows, np.int64), self._at),
            targets_K=to_device(np.array(targets, np.int64), self._at),
            spread=spread,
            **loss_tokens,
        )

    def blank(self) -> MicroBatch:
        """Returns a micro-batch of a sequence that is not in the batch, with its fields."""
        floats: dict[str, Any] = {name: (0.0, 0.0) for name in LOGPROB_FIELDS if self.has(name)}
        sequence = TrainSequence(
            ids=(0, 0),
            loss_mask=(False, True),
            advantages=0.0,
            selected=(False, False) if self.has("selected") else None,
            **floats,
        )
        packer = Packer(
            [sequence],
            [0.0],
            at=self._at,
            row_multiple=self._row_multiple,
            context=self._context,
            replaying=self._replaying,
            images=self._images,
        )
        return packer.micro_batch([0])

    def _rotary(
        self,
        chosen: Sequence[tuple[TrainSequence, NDArray[np.intp]]],
        own: Sequence[range],
        positions: Sequence[int],
    ) -> NDArray[np.int64]:
        """Returns the positions that the rows are turned by, [P] or [3, P]."""
        if self._images is None:
            return np.array(positions, np.int64)
        parts = [
            self._images.positions(sequence)[:, tokens.start : tokens.stop]
            for (sequence, _), tokens in zip(chosen, own, strict=True)
        ]
        found = np.zeros((3, len(positions)), dtype=np.int64)
        found[:, : sum(map(len, own))] = np.concatenate(parts, axis=1)
        return found

    def prefetch(self, indices: Sequence[int]) -> None:
        """Starts to decode the images of a later micro-batch."""
        if self._images is not None:
            self._images.prefetch([self.sequences[i] for i in indices])

    def _replayed(
        self,
        chosen: Sequence[tuple[TrainSequence, NDArray[np.intp]]],
        own: Sequence[range],
        padding: int,
    ) -> Tensor | None:
        if self._replaying is None:
            return None
        rows = [(s.routed_experts, places) for (s, _), places in zip(chosen, own, strict=True)]
        indices_PLK = replayed_indices(rows, self._replaying, padding=padding)
        return None if indices_PLK is None else indices_PLK.to(self._at, non_blocking=True)


class MicroBatches:
    """The micro-batches of one rank, each made when it is its turn: only few exist at a time."""

    def __init__(
        self, packer: Packer, parts: Sequence[tuple[Sequence[int], Sequence[int] | None]]
    ) -> None:
        """Args are the packer of the batch, and what its `micro_batch` takes for each of them."""
        self.packer = packer
        self.parts = parts

    @property
    def num_rows(self) -> int:
        """Rows of all of them, over all context ranks, without padding."""
        return sum(self.packer.num_rows(*part) for part in self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        for part, later in pairwise((*self.parts, None)):
            assert part is not None, "only the last one has none after it"
            micro = self.packer.micro_batch(*part)
            if later is not None:
                self.packer.prefetch(later[0])
            yield micro
