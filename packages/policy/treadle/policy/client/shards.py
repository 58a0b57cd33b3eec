"""Shards: the parts of a batch that the data-parallel groups of ranks get.

Invariants:

1. Each sequence has one shard, the number of the data-parallel group that computes it, for all
   passes and optimizer steps of a command.
2. A rank has the whole batch as far as a plan needs it (lengths, loss masks, what is there), and
   the values of its own shard only. A sequence of another shard is an *outline*: zeros in place of
   values, which nothing may compute with (`Packer.micro_batch` refuses).
3. Decoded, a shard trains as the whole batch would: what shards add up is equal but for rounding.

Encoded, a token takes 4 bytes for its id and, if it is a loss token, 4 per number and 1 bit per
flag that it carries; masks are runs. Arrays are pickled out of band (`to_frames`), so that the
driver copies them once and makes no object per token. Images that several sequences of a shard show
travel once.

Nothing here imports torch: the driver shards its batches.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treadle.agent_loop import BoolArray, FloatArray, IntArray
from treadle.policy.backends.megatron.prefixes import plan
from treadle.policy.client.batch import balance, cut, has_gradient, input_length
from treadle.policy.client.types import FLAG_FIELDS, FLOAT_FIELDS, TrainSequence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.agent_loop import PlacedImage, RoutedExperts
    from treadle.policy.client.types import SharePrefixes

__all__ = ["Frame", "Outgoing", "Shard", "assign", "encode", "from_frames", "to_frames"]

Frame = bytes | bytearray | memoryview

_OPTIONAL: Final = (*FLOAT_FIELDS, *FLAG_FIELDS)


def assign(
    sequences: Sequence[TrainSequence],
    num_shards: int,
    *,
    mini_batches: int = 1,
    share_prefixes: SharePrefixes = "never",
) -> list[int]:
    """Returns the shard of each sequence; balances each mini-batch alone.

    In a mini-batch, sequences with a gradient are balanced first, because a loss may leave out the
    others. Where prefixes are shared, neighbours in the order of their ids stay together.

    Args:
        sequences: The batch.
        num_shards: Number of data-parallel groups.
        mini_batches: Number of parts that optimizer steps are taken on.
        share_prefixes: "always", or "auto" for where it saves enough.
    """
    shards = [0] * len(sequences)
    if num_shards == 1:
        return shards
    first = 0
    for part in cut(sequences, mini_batches):
        lengths = [input_length(sequence) for sequence in part]
        moved = [has_gradient(sequence) for sequence in part]
        for wanted in (True, False):
            some = [i for i, has in enumerate(moved) if has is wanted and lengths[i]]
            ordered = plan.shared(part, some, share_prefixes)
            if ordered is None:
                parts = balance([lengths[i] for i in some], num_shards)
                groups = [[some[place] for place in members] for members in parts]
            else:
                groups = [list(each.indices) for each in ordered.balanced(num_shards)]
            for shard, members in enumerate(groups):
                for index in members:
                    shards[first + index] = shard
        first += len(part)
    return shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A batch as one data-parallel group gets it.

    Shape suffixes: N sequences of the batch, R runs of loss tokens of all of them, O tokens of the
    own sequences, T loss tokens of them.

    Attributes:
        number: Of the shard.
        shards_N: The shard of each sequence.
        lengths_N: Number of tokens of each.
        trajectories_N: `TrainSequence.trajectory`; -1 for None.
        advantages_N: Of all tokens of a sequence; NaN where they differ.
        moved_N: Whether it has a gradient.
        present_N: Which optional fields it has, a bit each.
        runs_N: Number of its runs of loss tokens.
        bounds_R2: Where the runs start and stop, in their sequence.
        ids_O: Of the own sequences.
        numbers: [T] of each field of numbers, 0 where a sequence has none; fields that no own
            sequence has are left out. "advantages": of those with one per token.
        flags: [T] of each field of flags, 8 to a byte.
        rest: Routed experts and images of the own sequences.
    """

    number: int
    shards_N: NDArray[np.int32]
    lengths_N: NDArray[np.int32]
    trajectories_N: NDArray[np.int64]
    advantages_N: NDArray[np.float64]
    moved_N: NDArray[np.bool_]
    present_N: NDArray[np.uint8]
    runs_N: NDArray[np.int32]
    bounds_R2: NDArray[np.int32]
    ids_O: NDArray[np.uint32]
    numbers: Mapping[str, NDArray[np.float32]]
    flags: Mapping[str, NDArray[np.uint8]]
    rest: tuple[tuple[RoutedExperts | None, tuple[PlacedImage, ...]], ...]

    def sequences(self) -> tuple[TrainSequence, ...]:
        """Returns the batch: the own sequences, and outlines of the others."""
        longest = int(self.lengths_N.max(initial=0))
        reader = _Reader(self, bytes(4 * longest))
        return tuple(reader.next() for _ in range(len(self.lengths_N)))


def encode(
    sequences: Sequence[TrainSequence], shards: Sequence[int], num_shards: int
) -> Iterator[Shard]:
    """Yields the shards of a batch by number, each encoded when it is asked for.

    Args:
        sequences: The batch.
        shards: The shard of each; see `assign`.
        num_shards: How many there are.
    """
    bounds = [_runs(sequence) for sequence in sequences]
    of_all: dict[str, Any] = {
        "shards_N": np.array(shards, np.int32),
        "lengths_N": np.array([len(s.ids) for s in sequences], np.int32),
        "trajectories_N": np.array(
            [-1 if s.trajectory is None else s.trajectory for s in sequences], np.int64
        ),
        "advantages_N": np.array(
            [s.advantages if isinstance(s.advantages, float) else np.nan for s in sequences]
        ),
        "moved_N": np.array([has_gradient(s) for s in sequences], np.bool_),
        "present_N": np.array(
            [
                sum(1 << bit for bit, name in enumerate(_OPTIONAL) if getattr(s, name) is not None)
                for s in sequences
            ],
            np.uint8,
        ),
        "runs_N": np.array([len(each) for each in bounds], np.int32),
        "bounds_R2": np.concatenate(bounds),
    }
    own: list[list[TrainSequence]] = [[] for _ in range(num_shards)]
    for sequence, shard in zip(sequences, shards, strict=True):
        own[shard].append(sequence)
    for number, members in enumerate(own):
        yield Shard(number=number, **of_all, **_values(members))


def _runs(sequence: TrainSequence) -> NDArray[np.int32]:
    """Returns where the runs of loss tokens start and stop."""
    edges = np.flatnonzero(np.diff(np.asarray(sequence.loss_mask).view(np.int8), append=0))
    return (edges + 1).reshape(-1, 2).astype(np.int32)


def _values(own: Sequence[TrainSequence]) -> dict[str, Any]:
    numbers: dict[str, NDArray[np.float32]] = {}
    for name in FLOAT_FIELDS:
        if any(getattr(s, name) is not None for s in own):
            numbers[name] = np.concatenate(
                [
                    np.zeros(s.num_loss_tokens, np.float32)
                    if getattr(s, name) is None
                    else s.at_loss_tokens(name)
                    for s in own
                ]
            )
    if any(not isinstance(s.advantages, float) for s in own):
        numbers["advantages"] = np.concatenate([s.at_loss_tokens("advantages") for s in own])
    flags = {
        name: np.packbits(np.concatenate([s.flags_at_loss_tokens(name) for s in own]))
        for name in FLAG_FIELDS
        if any(getattr(s, name) is not None for s in own)
    }
    return {
        "ids_O": np.concatenate([np.empty(0, np.uint32), *(np.asarray(s.ids) for s in own)]),
        "numbers": numbers,
        "flags": flags,
        "rest": tuple((s.routed_experts, s.images) for s in own),
    }


class _Reader:
    """Makes the sequences of a shard, one after the other.

    Args:
        shard: What to read.
        zeros: Memory for the values of outlines: 4 bytes per token of the longest sequence.
    """

    def __init__(self, shard: Shard, zeros: bytes) -> None:
        self._shard = shard
        self._zeros = memoryview(zeros)
        # Unpacked once: a flag per loss token of the shard.
        self._flags = {name: np.unpackbits(bits) for name, bits in shard.flags.items()}
        self._index = self._run = self._own = self._token = self._loss_token = 0

    def next(self) -> TrainSequence:
        shard, index = self._shard, self._index
        length = int(shard.lengths_N[index])
        mask = bytearray(length)
        first = self._run
        self._run += int(shard.runs_N[index])
        for start, stop in shard.bounds_R2[first : self._run].tolist():
            mask[start:stop] = b"\x01" * (stop - start)
        trajectory = int(shard.trajectories_N[index])
        scalar = float(shard.advantages_N[index])
        fields: dict[str, Any] = {
            "loss_mask": BoolArray.of_buffer(mask),
            "trajectory": None if trajectory < 0 else trajectory,
            "shard": int(shard.shards_N[index]),
            "advantages": scalar,
        }
        present = int(shard.present_N[index])
        names = [name for bit, name in enumerate(_OPTIONAL) if present >> bit & 1]
        self._index += 1
        if shard.shards_N[index] != shard.number:
            if np.isnan(scalar):
                fields["advantages"] = float(shard.moved_N[index])
            blank = self._zeros[: 4 * length]
            fields |= {name: FloatArray.of_buffer(blank) for name in names if name in FLOAT_FIELDS}
            flags = self._zeros[:length]
            fields |= {name: BoolArray.of_buffer(flags) for name in names if name in FLAG_FIELDS}
            return TrainSequence(ids=IntArray.of_buffer(blank), is_outline=True, **fields)
        experts, images = shard.rest[self._own]
        self._own += 1
        ids = shard.ids_O[self._token : self._token + length]
        self._token += length
        where = np.flatnonzero(np.frombuffer(mask, np.uint8))
        part = slice(self._loss_token, self._loss_token + len(where))
        self._loss_token += len(where)
        if np.isnan(scalar):
            names.append("advantages")
        for name in names:
            if name in FLAG_FIELDS:
                placed = np.zeros(length, np.uint8)
                placed[where] = self._flags[name][part]
                fields[name] = BoolArray.of_buffer(placed.data)
            else:
                numbers = np.zeros(length, np.float32)
                numbers[where] = shard.numbers[name][part]
                fields[name] = FloatArray.of_buffer(numbers.data)
        return TrainSequence(
            ids=IntArray.of_buffer(ids.data), routed_experts=experts, images=images, **fields
        )


def to_frames(shard: Shard) -> list[Frame]:
    """Returns a shard as buffers to send: a pickle without the arrays' memory, and that memory."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(shard, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


class Outgoing:
    """The shards of a batch on their way: encoded one after another, and sent meanwhile.

    One thread calls `encode`. Those that send wait for their shard in `num_frames` and `take`; they
    are woken when it is encoded, or when `encode` fails, with its error. A shard is taken once, and
    not kept.
    """

    def __init__(self, num_shards: int) -> None:
        self._encoded: list[Future[int]] = [Future() for _ in range(num_shards)]
        self._frames: dict[int, list[Frame]] = {}

    def encode(self, sequences: Sequence[TrainSequence], shards: Sequence[int]) -> None:
        """Encodes the shards of a batch; see the function `encode`."""
        try:
            for shard in encode(sequences, shards, len(self._encoded)):
                frames = to_frames(shard)
                self._frames[shard.number] = frames
                self._encoded[shard.number].set_result(len(frames))
        except Exception as error:
            for encoded in self._encoded:
                if not encoded.done():
                    encoded.set_exception(error)

    def num_frames(self, number: int) -> int:
        """Returns the number of frames of a shard, once it is encoded."""
        return self._encoded[number].result()

    def take(self, number: int) -> list[Frame]:
        """Returns the frames of a shard, once it is encoded."""
        self.num_frames(number)
        return self._frames.pop(number)


def from_frames(frames: Sequence[Frame]) -> Shard:
    """Returns the shard whose arrays have the memory of the frames."""
    shard = pickle.loads(frames[0], buffers=frames[1:])
    assert isinstance(shard, Shard)
    return shard
