from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.client import prefixes
from treadle.policy.client.prefixes import Ordered, in_order, overlaps_of
from treadle.policy.client.types import SharePrefixes, TrainSequence


def sequence(*parts: tuple[int, int]) -> TrainSequence:
    """Ids as runs of (id, count); the last run is trained on."""
    ids = tuple(i for i, count in parts for _ in range(count))
    trained = parts[-1][1]
    return TrainSequence(
        ids=ids,
        loss_mask=(False,) * (len(ids) - trained) + (True,) * trained,
        advantages=1.0,
    )


def order(paths: list[tuple[int, ...]]) -> Ordered:
    indices = in_order(paths)
    ids = [paths[i] for i in indices]
    return Ordered(tuple(indices), tuple(map(len, ids)), tuple(overlaps_of(ids)))


batches = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple), max_size=8).map(
    order
)


@given(batches, st.integers(1, 3), st.integers(1, 40), st.integers(1, 3))
def test_each_sequence_is_in_one_micro_batch_of_bounded_size(
    batch: Ordered, num_shards: int, max_tokens: int, at_least: int
) -> None:
    parts = [
        part
        for shard in range(num_shards)
        for part in prefixes.micro_batches(
            batch, num_shards=num_shards, shard=shard, max_tokens=max_tokens, at_least=at_least
        )
    ]
    assert [i for part in parts for i in part.indices] == list(batch.indices)
    for part in parts:
        assert len(part.indices) == 1 or part.num_rows <= max_tokens
        assert part.overlaps[0] == 0


@given(batches.filter(lambda batch: bool(batch.indices)), st.integers(1, 4))
def test_no_other_cut_has_a_smaller_largest_part(batch: Ordered, at_most: int) -> None:
    places = range(1, len(batch.indices))
    best = min(
        max(
            batch.part(a, b).num_rows
            for a, b in zip((0, *cuts), (*cuts, len(batch.indices)), strict=True)
        )
        for count in range(at_most)
        for cuts in combinations(places, count)
    )
    parts = batch.balanced(at_most)
    assert len(parts) <= at_most
    assert max(part.num_rows for part in parts) == best


def test_groups_stay_together_whatever_order_they_come_in() -> None:
    batch = [sequence((1 + i % 2, 30), (9 + i, 5)) for i in range(8)]
    found = prefixes.shared(batch, range(8), "auto")
    assert found is not None
    assert found.num_rows == 2 * 30 + 8 * 4
    halves = [
        prefixes.micro_batches(found, num_shards=2, shard=s, max_tokens=100) for s in range(2)
    ]
    assert [[part.indices for part in half] for half in halves] == [
        [(0, 2, 4, 6)],
        [(1, 3, 5, 7)],
    ]
    (whole,) = prefixes.micro_batches(found, num_shards=1, shard=0, max_tokens=92)
    assert whole.num_rows == 92
    assert len(prefixes.micro_batches(found, num_shards=1, shard=0, max_tokens=91)) == 2


@pytest.mark.parametrize(
    ("mode", "prompt", "shared"),
    [
        ("never", 40, False),
        ("auto", 40, True),
        ("auto", 16, False),  # it would save 16 of 232 tokens
        ("always", 16, True),
    ],
)
def test_auto_shares_where_it_saves_enough(mode: SharePrefixes, prompt: int, shared: bool) -> None:
    batch = [sequence((1, prompt), (2 + i, 101)) for i in range(2)]
    assert (prefixes.shared(batch, [0, 1], mode) is not None) is shared


def test_only_sequences_that_are_computed_and_ids_that_are_needed_count() -> None:
    batch = [sequence((1, 30), (2, 5)), sequence((1, 30), (3, 5)), sequence((1, 30), (2, 5))]
    found = prefixes.shared(batch, [2, 0], "always")
    assert found == Ordered((2, 0), (34, 34), (0, 34))
    assert prefixes.shared(batch, [2, 0], prefixes.mode_on("auto", cpu=False)) is None
    assert prefixes.shared(batch, [2, 0], prefixes.mode_on("auto", cpu=True)) == found
