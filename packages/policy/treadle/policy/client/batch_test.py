from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.client.batch import (
    MicroBatchRoom,
    balance,
    has_gradient,
    input_length,
    pack,
    token_weights,
)
from treadle.policy.client.types import LossAggregation, TrainSequence
from treadle.policy.config.policy import ParallelConfig, PolicyConfig

lengths = st.lists(st.integers(1, 300), max_size=40)


def sequence(mask: str, advantage: float = 1.0) -> TrainSequence:
    """One with a loss token where the mask has an x."""
    return TrainSequence(
        ids=tuple(range(len(mask))),
        loss_mask=tuple(c == "x" for c in mask),
        advantages=(advantage,) * len(mask),
    )


@pytest.mark.parametrize(
    ("aggregation", "want"),
    [
        ("token-mean", [1 / 4, 1 / 4, 1 / 4]),
        ("token-sum", [1.0, 1.0, 1.0]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 1 / 2]),
        ("seq-mean-token-mean", [1 / 6, 0.0, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_token_weights(aggregation: LossAggregation, want: list[float]) -> None:
    batch = [sequence(".xxx"), sequence("..."), sequence("..x")]
    assert token_weights(batch, aggregation, 10) == pytest.approx(want)


@pytest.mark.parametrize(
    "aggregation",
    get_args(LossAggregation),
)
@given(masks=st.lists(st.text(".x", max_size=12), min_size=1, max_size=5), data=st.data())
def test_splitting_a_trajectory_into_samples_changes_no_weight(
    aggregation: LossAggregation, masks: list[str], data: st.DataObject
) -> None:
    """The loss of each token counts for as much as if the trajectory were one sequence."""
    whole = [sequence(f"..{mask}x") for mask in masks]
    split: list[TrainSequence] = []
    for number, mask in enumerate(masks):
        at = data.draw(st.integers(0, len(mask)))
        for part in (mask[:at], f"{mask[at:]}x"):
            split.append(replace(sequence(f"..{part}"), trajectory=number))
    assert sum(s.num_loss_tokens for s in whole) == sum(s.num_loss_tokens for s in split)

    def by_token(sequences: list[TrainSequence]) -> list[float]:
        weights = token_weights(sequences, aggregation, 10)
        return [
            weight
            for s, weight in zip(sequences, weights, strict=True)
            for _ in range(s.num_loss_tokens)
        ]

    assert by_token(split) == pytest.approx(by_token(whole))


def test_a_batch_without_loss_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 1 sequences"):
        token_weights([sequence("...")], "token-mean")


def test_only_tokens_that_something_depends_on_are_computed() -> None:
    assert input_length(sequence("..xx..")) == 3  # tokens 0 to 2 predict up to token 3
    assert input_length(sequence(".....")) == 0


def test_an_advantage_outside_the_mask_is_no_gradient() -> None:
    assert has_gradient(sequence(".x", 0.5))
    assert not has_gradient(sequence(".x", 0.0))
    assert not has_gradient(sequence("..", 0.5))


@given(lengths, st.integers(1, 9))
def test_balance_gives_each_sequence_to_one_shard_within_the_bound(
    sizes: list[int], num_shards: int
) -> None:
    shards = balance(sizes, num_shards)
    assert sorted(i for shard in shards for i in shard) == list(range(len(sizes)))
    assert len(shards) == num_shards
    if sizes:
        best = max(sum(sizes) / num_shards, max(sizes))
        heaviest = max(sum(sizes[i] for i in shard) for shard in shards)
        assert heaviest <= 2 * best  # 4/3 of the optimum, which is at most 3/2 of this bound


@given(lengths, st.integers(1, 600), st.integers(1, 4))
def test_pack_keeps_the_budget_and_orders_by_length(
    sizes: list[int], budget: int, at_least: int
) -> None:
    packs = pack(sizes, max_tokens=budget, at_least=at_least)
    assert sorted(i for p in packs for i in p) == list(range(len(sizes)))
    assert len(packs) >= min(at_least, len(sizes))
    for members in packs:
        assert len(members) == 1 or sum(sizes[i] for i in members) <= budget
        assert [sizes[i] for i in members] == sorted(sizes[i] for i in members)


def test_sequences_that_no_micro_batch_has_room_for_are_named() -> None:
    batch = [sequence("." * 20 + "x"), sequence("." * 8 + "x")]  # of 20 and 8 inputs
    assert MicroBatchRoom(PolicyConfig(micro_batch_tokens=20)).too_long(batch) is None
    room = MicroBatchRoom(PolicyConfig(micro_batch_tokens=8))
    said = room.too_long(batch)
    assert said is not None and said.startswith("1 of 2 sequences are longer than the 8 tokens")
    assert "up to 20: each is a micro-batch of its own, which takes 2.5 times" in said
    assert room.too_long(batch) is None
    assert room.too_long([*batch, sequence("." * 30 + "x")]) is not None
    two = PolicyConfig(micro_batch_tokens=8, parallel=ParallelConfig(context=2))
    said = MicroBatchRoom(two).too_long(batch)
    assert said is not None and "16 tokens" in said and "x policy.parallel.context)" in said
