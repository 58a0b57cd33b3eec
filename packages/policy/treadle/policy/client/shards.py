"""Shards: the parts of a batch that the data-parallel groups of ranks get.

Invariants:

1. Each sequence has one shard, the number of the data-parallel group that computes it, for all
   passes and optimizer steps of a command.
2. A rank has what a plan needs of the whole batch (lengths, loss masks, which fields are present),
   and the values of its own shard only. A sequence of another shard is an *outline*: it has zeros
   for values, and must not be used in computations (`Packer.micro_batch` refuses).
3. Decoded, a shard trains as the whole batch would: sums over shards are equal but for rounding.

Encoded, a token takes 4 bytes for its id and, if it is a loss token, 4 per number and 1 bit per
flag that it carries; masks are runs. A shard is a message, `treadle.policy.v1.Shard`, which gives
the offset of each array in a memory, and that memory. The driver makes no object per token. Images
that several sequences of a shard show travel once.

Nothing here imports torch: the driver shards its batches.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treadle.agent_loop import (
    BoolArray,
    FloatArray,
    Image,
    IntArray,
    PlacedImage,
    RoutedExperts,
)
from treadle.policy.client import prefixes
from treadle.policy.client.batch import balance, cut, has_gradient, input_length
from treadle.policy.client.types import FLAG_FIELDS, FLOAT_FIELDS, TrainSequence
from treadle.policy.v1 import training_service_pb2 as pb

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treadle.policy.client.types import SharePrefixes

__all__ = ["Outgoing", "Shard", "assign", "decode", "encode"]

_OPTIONAL: Final = (*FLOAT_FIELDS, *FLAG_FIELDS)
_ALIGNED = 8
_PART_BYTES: Final = 1 << 20
"""Of the memory in one message."""
_WINDOW: Final = 2
"""Shards that exist at a time: one is sent while the next is encoded."""


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
            ordered = prefixes.shared(part, some, share_prefixes)
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


@dataclass(slots=True)
class Shard:
    """A batch as one data-parallel group gets it, on its way.

    Attributes:
        buffers: Pieces of memory, in the order of the arrays.
    """

    head: pb.Shard
    buffers: deque[memoryview] = field(default_factory=deque)

    def place(self, array: pb.Array, *parts: NDArray[Any]) -> None:
        """Adds an array to the memory, and notes its place; the parts are not copied.

        Args:
            parts: At least one, of one type; they follow each other in the array.
        """
        size = sum(part.nbytes for part in parts)
        array.element_type, array.length = parts[0].dtype.str[1:], sum(map(len, parts))
        array.offset = self.head.memory_bytes
        padding = np.zeros(-size % _ALIGNED, np.uint8)
        self.buffers += (part.view(np.uint8).data for part in (*parts, padding))
        self.head.memory_bytes += size + len(padding)

    def messages(self) -> Iterator[pb.SendBatchRequest]:
        """Yields what `SendBatch` is given, once: the memory is not kept."""
        yield pb.SendBatchRequest(shard=self.head)
        part = bytearray()
        while self.buffers:
            buffer = self.buffers.popleft()
            while len(buffer):
                free = _PART_BYTES - len(part)
                part += buffer[:free]
                buffer = buffer[free:]
                if len(part) == _PART_BYTES:
                    yield pb.SendBatchRequest(memory=bytes(part))
                    part.clear()
        if part:
            yield pb.SendBatchRequest(memory=bytes(part))


def encode(
    sequences: Sequence[TrainSequence], shards: Sequence[int], num_shards: int, *, batch: int = 0
) -> Iterator[Shard]:
    """Yields the shards of a batch by number, each encoded when the iterator advances.

    Args:
        shards: The shard of each; see `assign`.
    """
    bounds = [_runs(sequence) for sequence in sequences]
    of_all: dict[str, NDArray[Any]] = {
        "shards": np.array(shards, np.int32),
        "lengths": np.array([len(s.ids) for s in sequences], np.int32),
        "trajectories": np.array(
            [-1 if s.trajectory is None else s.trajectory for s in sequences], np.int64
        ),
        "advantages": np.array(
            [s.advantages if isinstance(s.advantages, float) else np.nan for s in sequences]
        ),
        "moved": np.array([has_gradient(s) for s in sequences], np.uint8),
        "present": np.array(
            [
                sum(1 << bit for bit, name in enumerate(_OPTIONAL) if getattr(s, name) is not None)
                for s in sequences
            ],
            np.uint8,
        ),
        "runs": np.array([len(each) for each in bounds], np.int32),
        "bounds": np.concatenate(bounds).reshape(-1),
    }
    own: list[list[TrainSequence]] = [[] for _ in range(num_shards)]
    for sequence, number in zip(sequences, shards, strict=True):
        own[number].append(sequence)
    for number, members in enumerate(own):
        shard = Shard(pb.Shard(batch=batch, number=number))
        for name, parts in ({n: (of,) for n, of in of_all.items()} | _values(members)).items():
            shard.place(getattr(shard.head, name), *parts)
        if any(s.images or s.routed_experts or s.sampling_masks for s in members):
            _place_extras(shard, members)
        yield shard


def _runs(sequence: TrainSequence) -> NDArray[np.int32]:
    """Returns where the runs of loss tokens start and stop."""
    edges = np.flatnonzero(np.diff(np.asarray(sequence.loss_mask).view(np.int8), append=0))
    return (edges + 1).reshape(-1, 2).astype(np.int32)


def _values(own: Sequence[TrainSequence]) -> dict[str, Sequence[NDArray[Any]]]:
    """Returns the arrays of a shard, in parts; nothing is copied that a sequence has already."""
    values: dict[str, Sequence[NDArray[Any]]] = {
        "ids": [np.empty(0, np.uint32), *(np.asarray(s.ids) for s in own)]
    }
    for name in FLOAT_FIELDS:
        if any(getattr(s, name) is not None for s in own):
            values[name] = [
                np.zeros(s.num_loss_tokens, np.float32)
                if getattr(s, name) is None
                else s.at_loss_tokens(name)
                for s in own
            ]
    for name in FLAG_FIELDS:
        if any(getattr(s, name) is not None for s in own):
            flags = np.concatenate([s.flags_at_loss_tokens(name) for s in own])
            values[name] = (np.packbits(flags),)
    if any(not isinstance(s.advantages, float) for s in own):
        values["token_advantages"] = [s.at_loss_tokens("advantages") for s in own]
    return values


def _place_extras(shard: Shard, own: Sequence[TrainSequence]) -> None:
    indices: dict[int, int] = {}  # by identity: sequences share the object
    for sequence in own:
        extras, experts = shard.head.extras.add(), sequence.routed_experts
        if experts is not None:
            for name in ("first", "num_layers", "top_k", "id_bytes"):
                setattr(extras.routed_experts, name, getattr(experts, name))
            shard.place(extras.routed_experts.data, np.frombuffer(experts.data, np.uint8))
        if masks := sequence.masks_at_loss_tokens:
            sizes = np.fromiter(map(len, masks), np.uint32, len(masks))
            shard.place(extras.sampling_mask_sizes, sizes)
            shard.place(extras.sampling_masks, np.frombuffer(b"".join(masks), np.uint8))
        for placed in sequence.images:
            if id(placed.image) not in indices:
                indices[id(placed.image)] = len(indices)
                image = shard.head.images.add(mime=placed.image.mime)
                shard.place(image.data, np.frombuffer(placed.image.data, np.uint8))
            extras.images.add(
                image=indices[id(placed.image)], start=placed.start, num_tokens=placed.num_tokens
            )


def decode(head: pb.Shard, memory: bytes | bytearray) -> tuple[TrainSequence, ...]:
    """Returns the batch: the own sequences, which share the memory, and outlines of the others."""
    reader = _Reader(head, memory)
    return tuple(reader.next() for _ in range(head.lengths.length))


class _Reader:
    """Makes the sequences of a shard, one after the other."""

    def __init__(self, head: pb.Shard, memory: bytes | bytearray) -> None:
        self._number = head.number
        self._memory = memory
        arrays = {
            name: self._array(getattr(head, name))
            for name in head.DESCRIPTOR.fields_by_name
            if isinstance(getattr(head, name), pb.Array) and head.HasField(name)
        }
        self._of = arrays
        # Unpacked once: a flag per loss token of the shard.
        self._flags = {name: np.unpackbits(arrays[name]) for name in FLAG_FIELDS if name in arrays}
        # For the values of outlines.
        self._zeros = memoryview(bytes(4 * int(arrays["lengths"].max(initial=0))))
        self._images = [Image(data=self._bytes(i.data), mime=i.mime) for i in head.images]
        self._extras = iter(head.extras)
        self._index = self._run = self._token = self._loss_token = 0

    def _array(self, array: pb.Array) -> NDArray[Any]:
        dtype = np.dtype(f"<{array.element_type}")
        return np.frombuffer(self._memory, dtype, array.length, array.offset)

    def _bytes(self, array: pb.Array) -> bytes:
        return self._array(array).tobytes()

    def next(self) -> TrainSequence:
        of, index = self._of, self._index
        length = int(of["lengths"][index])
        mask = bytearray(length)
        first = self._run
        self._run += int(of["runs"][index])
        for start, stop in of["bounds"][2 * first : 2 * self._run].reshape(-1, 2).tolist():
            mask[start:stop] = b"\x01" * (stop - start)
        trajectory = int(of["trajectories"][index])
        scalar = float(of["advantages"][index])
        shard = int(of["shards"][index])
        fields: dict[str, Any] = {
            "loss_mask": BoolArray.of_buffer(mask),
            "trajectory": None if trajectory < 0 else trajectory,
            "shard": shard,
            "advantages": scalar,
        }
        present = int(of["present"][index])
        names = [name for bit, name in enumerate(_OPTIONAL) if present >> bit & 1]
        self._index += 1
        if shard != self._number:
            if np.isnan(scalar):
                fields["advantages"] = float(of["moved"][index])
            blank = self._zeros[: 4 * length]
            fields |= {name: FloatArray.of_buffer(blank) for name in names if name in FLOAT_FIELDS}
            flags = self._zeros[:length]
            fields |= {name: BoolArray.of_buffer(flags) for name in names if name in FLAG_FIELDS}
            return TrainSequence(ids=IntArray.of_buffer(blank), is_outline=True, **fields)
        ids = of["ids"][self._token : self._token + length]
        self._token += length
        where = np.flatnonzero(np.frombuffer(mask, np.uint8))
        part = slice(self._loss_token, self._loss_token + len(where))
        self._loss_token += len(where)
        if np.isnan(scalar):
            fields["advantages"] = _placed(of["token_advantages"][part], where, length)
        for name in names:
            if name in FLAG_FIELDS:
                placed = np.zeros(length, np.uint8)
                placed[where] = self._flags[name][part]
                fields[name] = BoolArray.of_buffer(placed.data)
            else:
                fields[name] = _placed(of[name][part], where, length)
        extras = self._extras_of_next(where, length)
        return TrainSequence(ids=IntArray.of_buffer(ids.data), **extras, **fields)

    def _extras_of_next(self, where: NDArray[np.intp], length: int) -> dict[str, Any]:
        """Returns what few sequences have of one with `length` ids and loss tokens at `where`."""
        extras = next(self._extras, None)
        if extras is None:
            return {}
        masks: list[bytes] = []
        if extras.HasField("sampling_mask_sizes"):
            masks = [b""] * length
            data, first = self._bytes(extras.sampling_masks), 0
            sizes = self._array(extras.sampling_mask_sizes).tolist()
            for position, size in zip(where.tolist(), sizes, strict=True):
                masks[position] = data[first : first + size]
                first += size
        images = tuple(
            PlacedImage(image=self._images[i.image], start=i.start, num_tokens=i.num_tokens)
            for i in extras.images
        )
        if not extras.HasField("routed_experts"):
            return {"images": images, "sampling_masks": tuple(masks)}
        experts = extras.routed_experts
        routed = RoutedExperts(
            first=experts.first,
            num_layers=experts.num_layers,
            top_k=experts.top_k,
            id_bytes=experts.id_bytes,
            data=self._bytes(experts.data),
        )
        return {"images": images, "routed_experts": routed, "sampling_masks": tuple(masks)}


def _placed(numbers: NDArray[Any], where: NDArray[np.intp], length: int) -> FloatArray:
    placed = np.zeros(length, np.float32)
    placed[where] = numbers
    return FloatArray.of_buffer(placed.data)


class Outgoing:
    """The shards of a batch on their way: encoded one after another, and sent meanwhile.

    At most `_WINDOW` of them exist at a time: a shard makes room when it is sent. One thread calls
    `encode`; those that send wait for their shard, which fails if `encode` does.
    """

    def __init__(self, num_shards: int) -> None:
        self._untaken: dict[int, Future[Shard]] = {n: Future() for n in range(num_shards)}
        self._waiting = list(reversed(self._untaken.values()))
        self._room = threading.Semaphore(_WINDOW)
        self._closed = False
        for shard in self._waiting:
            shard.set_running_or_notify_cancel()  # who waits no more does not disturb `encode`

    @asynccontextmanager
    async def taken(self, number: int) -> AsyncIterator[Shard]:
        """Waits for a shard, which is sent inside the block; each is taken once, and not kept."""
        shard = await asyncio.wrap_future(self._untaken.pop(number))
        try:
            yield shard
        finally:
            self._room.release()

    def encode(
        self, sequences: Sequence[TrainSequence], shards: Sequence[int], *, batch: int
    ) -> None:
        """Encodes the shards of a batch until `close`; see the function `encode`."""
        try:
            encoded = encode(sequences, shards, len(self._waiting), batch=batch)
            while self._waiting and self._room.acquire() and not self._closed:
                self._waiting[-1].set_result(next(encoded))
                self._waiting.pop()
        except Exception as error:
            for each in self._waiting:
                each.set_exception(error)

    def close(self) -> None:
        """Ends `encode`, which may wait for shards that nobody sends any more."""
        self._closed = True
        self._room.release()
