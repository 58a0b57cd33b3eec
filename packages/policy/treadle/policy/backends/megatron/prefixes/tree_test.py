from hypothesis import given
from hypothesis import strategies as st

from treadle.policy.backends.megatron.prefixes.tree import rows_of_paths, runs_of
from treadle.policy.client.prefixes import MIN_SAVED_ROWS, in_order, overlaps_of, without_short_runs

# Two ids make trees of many levels; repeating a stem makes their runs long.
paths = st.lists(
    st.lists(st.sampled_from([(1,), (2,), (1,) * 9, (3,) * 20]), min_size=1, max_size=7).map(
        lambda parts: tuple(i for part in parts for i in part)
    ),
    min_size=1,
    max_size=9,
)


def sort(given: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [given[i] for i in in_order(given)]


def test_the_example_of_the_module() -> None:
    ids = sort([(1, 5, 6), (1, 2, 3), (1, 2, 3, 4)])
    assert ids == [(1, 2, 3), (1, 2, 3, 4), (1, 5, 6)]
    assert overlaps_of(ids) == [0, 3, 1]
    assert rows_of_paths([3, 4, 3], [0, 3, 1]) == [[0, 1, 2], [0, 1, 2, 3], [0, 4, 5]]
    runs = runs_of([3, 4, 3], [0, 3, 1])
    assert [(r.start, r.stop, r.end) for r in runs] == [(0, 1, 6), (1, 3, 4), (3, 4, 4), (4, 6, 6)]


def test_equal_sequences_keep_their_order() -> None:
    assert in_order([(2,), (1,), (2,), (1,)]) == [1, 3, 0, 2]


@given(paths)
def test_each_distinct_prefix_has_one_row(given: list[tuple[int, ...]]) -> None:
    ids = sort(given)
    lengths, overlaps = [len(path) for path in ids], overlaps_of(ids)
    prefixes = {path[:n] for path in ids for n in range(1, len(path) + 1)}
    assert sum(lengths) - sum(overlaps) == len(prefixes)
    row_of: dict[tuple[int, ...], int] = {}
    for path, rows in zip(ids, rows_of_paths(lengths, overlaps), strict=True):
        for n, row in enumerate(rows, start=1):
            assert row_of.setdefault(path[:n], row) == row
    assert sorted(row_of.values()) == list(range(len(prefixes)))


@given(paths, st.booleans())
def test_a_row_sees_its_path_and_nothing_else(given: list[tuple[int, ...]], short: bool) -> None:
    ids = sort(given)
    lengths, overlaps = [len(path) for path in ids], overlaps_of(ids)
    if not short:
        overlaps = without_short_runs(overlaps)
    runs = runs_of(lengths, overlaps)
    assert [r.start for r in runs] == [0, *(r.stop for r in runs[:-1])]
    for rows in rows_of_paths(lengths, overlaps):
        for place, row in enumerate(rows):
            seen = [
                x
                for run in runs
                if run.start <= row < run.end
                for x in range(run.start, min(run.stop, row + 1))
            ]
            assert seen == rows[: place + 1]


@given(paths)
def test_every_run_that_stays_shared_saves_enough(given: list[tuple[int, ...]]) -> None:
    ids = sort(given)
    lengths, overlaps = [len(path) for path in ids], overlaps_of(ids)
    kept = without_short_runs(overlaps)
    assert all(0 <= k <= o for k, o in zip(kept, overlaps, strict=True))
    rows = [set(r) for r in rows_of_paths(lengths, kept)]
    for run in runs_of(lengths, kept):
        users = sum(run.start in r for r in rows)
        assert users == 1 or (run.stop - run.start) * (users - 1) >= MIN_SAVED_ROWS


def test_a_short_run_is_shared_with_the_long_one_below_it() -> None:
    # All four share 2 ids, which save 6 rows; two of them share 20 more.
    assert without_short_runs([0, 2, 22, 2]) == [0, 0, 22, 0]
    assert without_short_runs([0, 16, 16]) == [0, 16, 16]
    assert without_short_runs([]) == []
