"""Shards: what each data-parallel group gets of a batch, and what it costs on the wire."""

import asyncio
import queue
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.agent_loop import BoolArray, Image, IntArray, PlacedImage, RoutedExperts
from treadle.policy.client import shards
from treadle.policy.client.batch import cut, has_gradient, input_length, token_weights
from treadle.policy.client.shards import Outgoing, Shard, assign, decode, encode
from treadle.policy.client.types import FLAG_FIELDS, FLOAT_FIELDS, TrainSequence
from treadle.policy.v1.training_service_pb2 import SendBatchRequest

_NUMBERS = (*FLOAT_FIELDS, "advantages")


@st.composite
def _sequences(draw: st.DrawFn) -> tuple[TrainSequence, ...]:
    def numbers(length: int) -> tuple[float, ...]:
        return tuple(draw(st.floats(-4, 4, width=16)) for _ in range(length))

    def one(trajectory: int) -> TrainSequence:
        length = draw(st.integers(2, 9))
        bits = st.booleans()
        given_ = [name for name in FLOAT_FIELDS if draw(bits)]
        flags = [name for name in FLAG_FIELDS if draw(bits)]
        return TrainSequence(
            ids=tuple(draw(st.integers(0, 2**32 - 1)) for _ in range(length)),
            loss_mask=(False, *(draw(bits) for _ in range(length - 1))),
            advantages=draw(st.sampled_from([0.0, 1.5])) if draw(bits) else numbers(length),
            trajectory=draw(st.sampled_from([None, trajectory // 2])),
            sampling_masks=tuple(draw(st.binary(max_size=3)) for _ in range(length))
            if draw(bits)
            else (),
            **{name: numbers(length) for name in given_},  # type: ignore[arg-type]
            **{name: tuple(draw(bits) for _ in range(length)) for name in flags},  # type: ignore[arg-type]
        )

    return tuple(one(number) for number in range(draw(st.integers(1, 6))))


def _sent(shard: Shard) -> list[bytes]:
    return [message.SerializeToString() for message in shard.messages()]


def _received(messages: Sequence[bytes]) -> tuple[TrainSequence, ...]:
    first, *rest = map(SendBatchRequest.FromString, messages)
    memory = b"".join(message.memory for message in rest)
    assert len(memory) == first.shard.memory_bytes
    return decode(first.shard, memory)


@given(batch=_sequences(), num_shards=st.integers(1, 4), mini_batches=st.integers(1, 3))
def test_each_sequence_is_whole_on_its_shard_and_an_outline_on_the_others(
    batch: tuple[TrainSequence, ...], num_shards: int, mini_batches: int
) -> None:
    numbers = assign(batch, num_shards, mini_batches=mini_batches)
    for shard in encode(batch, numbers, num_shards):
        decoded = _received(_sent(shard))
        assert len(decoded) == len(batch)
        for found, sequence, number in zip(decoded, batch, numbers, strict=True):
            assert (found.shard, found.is_outline) == (number, number != shard.head.number)
            assert (found.loss_mask, found.trajectory) == (sequence.loss_mask, sequence.trajectory)
            assert has_gradient(found) is has_gradient(sequence)
            assert len(found.ids) == len(sequence.ids)
            for name in (*FLOAT_FIELDS, *FLAG_FIELDS):
                assert (getattr(found, name) is None) is (getattr(sequence, name) is None)
            if found.is_outline:
                continue
            assert found.ids == sequence.ids
            for name in _NUMBERS:
                if getattr(sequence, name) is not None:
                    there, here = found.at_loss_tokens(name), sequence.at_loss_tokens(name)
                    assert there.tolist() == here.tolist()
            assert found.masks_at_loss_tokens == sequence.masks_at_loss_tokens
            for name in FLAG_FIELDS:
                flags = found.flags_at_loss_tokens(name)
                assert flags.tolist() == sequence.flags_at_loss_tokens(name).tolist()
        if any(sequence.num_loss_tokens for sequence in batch):
            for part, whole in zip(cut(decoded, 2), cut(batch, 2), strict=True):
                if any(sequence.num_loss_tokens for sequence in whole):
                    of_shard = token_weights(part, "seq-mean-token-mean")
                    assert of_shard == token_weights(whole, "seq-mean-token-mean")


def _of_lengths(lengths: Sequence[int], advantages: Sequence[float]) -> list[TrainSequence]:
    return [
        TrainSequence(
            ids=range(length + 1), loss_mask=(*(False,) * length, True), advantages=advantage
        )
        for length, advantage in zip(lengths, advantages, strict=True)
    ]


def test_every_mini_batch_is_balanced_and_so_is_what_has_a_gradient() -> None:
    batch = _of_lengths([8, 1, 8, 1, 8, 8, 1, 1], [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    numbers = assign(batch, 2, mini_batches=2)
    for part in (range(4), range(4, 8)):
        moved = [i for i in part if has_gradient(batch[i])]
        loads = [sum(input_length(batch[i]) for i in moved if numbers[i] == n) for n in (0, 1)]
        assert abs(loads[0] - loads[1]) <= 1


def test_sequences_with_a_common_prefix_stay_together() -> None:
    shared = [
        replace(s, ids=IntArray((*([group] * 30), *s.ids[30:])))
        for group, s in zip((1, 2, 1, 2), _of_lengths([40] * 4, [1.0] * 4), strict=True)
    ]
    numbers = assign(shared, 2, share_prefixes="auto")
    assert numbers[0] == numbers[2] != numbers[1] == numbers[3]


def test_a_token_costs_at_most_8_bytes_on_the_wire() -> None:
    length, count = 4000, 16
    sequence = TrainSequence(
        ids=range(length),
        loss_mask=(*(False,) * 1000, *(True,) * (length - 1000)),
        advantages=0.5,
        rollout_logprobs=(-0.5,) * length,
        stale=(*(False,) * 2000, *(True,) * (length - 2000)),
    )
    batch = [sequence] * count
    halves = encode(batch, assign(batch, 2), 2)
    sent = sum(len(message) for shard in halves for message in _sent(shard))
    assert sent <= 8 * length * count


def test_a_shard_is_sent_while_the_next_one_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = _of_lengths([8] * 4, [1.0] * 4)
    begun: queue.SimpleQueue[int] = queue.SimpleQueue()

    def watched(*arguments: object, **more: object) -> Iterator[Shard]:
        for shard in encode(batch, [0, 1, 2, 3], 4):
            begun.put(shard.head.number)
            if shard.head.number == 3:
                raise MemoryError("no room")
            yield shard

    monkeypatch.setattr(shards, "encode", watched)
    outgoing = Outgoing(4)

    async def send_all() -> None:
        encoding = asyncio.create_task(
            asyncio.to_thread(outgoing.encode, batch, [0, 1, 2, 3], batch=1)
        )
        async with outgoing.taken(0) as first:
            assert [await asyncio.to_thread(begun.get) for _ in range(2)] == [0, 1]
            assert len(_received(_sent(first))) == 4
            assert begun.empty()  # the third waits until the first is sent
        async with outgoing.taken(1) as second:
            assert (second.head.number, await asyncio.to_thread(begun.get)) == (1, 2)
            assert begun.empty()
        with pytest.raises(MemoryError, match="no room"):
            async with outgoing.taken(3):
                pass
        await encoding

    asyncio.run(send_all())


def test_a_batch_that_is_sent_no_more_is_encoded_no_further() -> None:
    outgoing = Outgoing(4)
    with ThreadPoolExecutor(1) as threads:  # waits for its thread at the end
        threads.submit(outgoing.encode, _of_lengths([8] * 4, [1.0] * 4), [0, 1, 2, 3], batch=1)
        outgoing.close()


def test_an_image_that_sequences_share_travels_once() -> None:
    image = Image(data=bytes(100_000), mime="image/png")
    experts = RoutedExperts(first=0, num_layers=1, top_k=1, id_bytes=1, data=b"\1\2\3")
    batch = [
        replace(
            s,
            images=(PlacedImage(image=image, start=1, num_tokens=4),),
            routed_experts=experts,
        )
        for s in _of_lengths([8] * 4, [1.0] * 4)
    ]
    (shard,) = encode(batch, [0] * 4, 1)
    messages = _sent(shard)
    assert sum(map(len, messages)) < 110_000
    first, second, *_ = _received(messages)
    assert first.images[0].image is second.images[0].image
    assert second.routed_experts == experts


def test_a_batch_without_loss_tokens_is_sent_too() -> None:
    empty = replace(_of_lengths([3], [0.0])[0], loss_mask=BoolArray((False,) * 4))
    (shard,) = encode([empty], assign([empty], 1), 1)
    decoded = _received(_sent(shard))
    assert decoded[0].num_loss_tokens == 0
    with pytest.raises(ValueError, match="loss mask"):
        token_weights(decoded, "token-mean")
