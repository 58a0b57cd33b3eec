from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.backends.megatron.context.rows import (
    BLOCKS_PER_RANK,
    row_multiple,
    rows_of_ranks,
)

lengths_and_ranks = st.tuples(
    st.lists(st.integers(1, 300), min_size=1, max_size=12), st.sampled_from([2, 3, 4, 8])
)


def positions_of(lengths: list[int], ranks: int) -> list[int]:
    positions = [t for length in lengths for t in range(length)]
    return positions + [0] * (-len(positions) % row_multiple(ranks))


@given(lengths_and_ranks)
def test_each_row_is_on_one_rank_and_attention_is_balanced(
    drawn: tuple[list[int], int],
) -> None:
    lengths, ranks = drawn
    positions = positions_of(lengths, ranks)
    parts = rows_of_ranks(positions, ranks)
    rows = [[row for rows in part for row in rows] for part in parts]
    assert sorted(row for mine in rows for row in mine) == list(range(len(positions)))
    assert {len(mine) for mine in rows} == {len(positions) // ranks}
    for part in parts:
        assert all(a.stop < b.start for a, b in pairwise(part))
    work = [sum(positions[row] for row in mine) for mine in rows]
    size = len(positions) // (ranks * BLOCKS_PER_RANK)
    blocks = [sum(positions[i : i + size]) for i in range(0, len(positions), size)]
    assert max(work) - min(work) <= max(blocks) - min(blocks)


def test_ranks_work_alike_on_one_long_sequence_and_on_one_behind_many_short_ones() -> None:
    for lengths in ([4096], [128] * 16 + [2048]):
        positions = positions_of(sorted(lengths), 2)
        work = [
            sum(positions[row] for rows in part for row in rows)
            for part in rows_of_ranks(positions, 2)
        ]
        assert max(work) < 1.05 * min(work)


def test_rows_of_one_sequence_are_a_zigzag() -> None:
    assert rows_of_ranks(range(16), 2) == [
        [range(2), range(6, 10), range(14, 16)],
        [range(2, 6), range(10, 14)],
    ]


def test_blocks_and_the_rows_of_a_tensor_parallel_rank_are_whole() -> None:
    assert [row_multiple(*args) for args in ((1,), (1, 2), (2,), (2, 2), (2, 8), (3, 6))] == [
        *(1, 2, 8, 8, 16, 36),
    ]
