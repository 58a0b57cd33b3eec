from array import array
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from treadle.rollout_server.engines.torch.draft_index import ORDERS, DraftIndex, DraftText

IDS = st.lists(st.integers(0, 3), max_size=12)
SHORTEST = ORDERS[-1]


def collide(index: DraftIndex, texts: Sequence[Sequence[int]]) -> bool:
    """Whether two n-grams of texts have one slot."""
    ngrams = {
        tuple(text[place - order : place])
        for text in texts
        for order in ORDERS
        for place in range(order, len(text) + 1)
    }
    return len({index.slot(array("i", ngram)) for ngram in ngrams}) < len(ngrams)


def longest(text: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """The length of the longest end of a text, of those in `ORDERS`, that others continue."""
    for order in ORDERS:
        end = list(text[len(text) - order :])
        for other in others:
            places = range(order, len(other))
            if len(text) >= order and any(list(other[p - order : p]) == end for p in places):
                return order
    return 0


@given(st.lists(st.tuples(st.integers(0, 3), IDS), max_size=12))
def test_it_finds_what_a_search_of_all_texts_finds(steps: list[tuple[int, list[int]]]) -> None:
    index = DraftIndex(1 << 12)
    texts: dict[int, DraftText] = {}
    held: dict[int, list[int]] = {}
    for which, ids in steps:
        if which not in texts:
            texts[which], held[which] = index.open(ids, 0), list(ids)
        else:
            index.extend(texts[which], ids)
            held[which] += ids
        assert index.num_ids == sum(map(len, held.values()))
        assume(not collide(index, list(held.values())))
        for name, text in texts.items():
            found = index.find(text)
            order = longest(held[name], list(held.values()))
            if found is None:
                assert not order
                continue
            assert ORDERS[found[0]] == order
            _, other, place = found
            end = held[name][len(held[name]) - order :]
            assert other.ids[place - order : place].tolist() == end
            assert place < len(other.ids)


@given(st.lists(st.tuples(st.integers(0, 5), IDS), max_size=30), st.integers(1, 20))
def test_its_texts_stay_within_the_capacity(
    steps: list[tuple[int, list[int]]], capacity: int
) -> None:
    index = DraftIndex(capacity)
    texts: dict[int, DraftText] = {}
    for which, ids in steps:
        if which not in texts:
            texts[which] = index.open(ids, len(ids) // 2)
        else:
            index.extend(texts[which], ids)
        assert index.num_ids <= capacity
        for text in texts.values():
            found = index.find(text)
            assert found is None or found[2] < len(found[1].ids)


def test_the_newest_place_is_found() -> None:
    index = DraftIndex(100)
    ngram = list(range(SHORTEST))
    index.open([*ngram, 50], 0)
    newer = index.open([9, *ngram, 60], 0)
    found = index.find(index.open(ngram, 0))
    assert found is not None
    assert found[1:] == (newer, SHORTEST + 1)


def test_ids_that_were_entered_before_are_read_as_context_only() -> None:
    index = DraftIndex(100)
    ngram = list(range(SHORTEST))
    index.open([*ngram, 50], len(ngram) + 1)
    assert index.find(index.open(ngram, 0)) is None
    known = index.open([*ngram, 50], len(ngram))
    found = index.find(index.open(ngram, 0))
    assert found is not None
    assert found[1] is known


@pytest.mark.parametrize("capacity", [1, 5])
def test_a_text_that_is_too_long_is_not_held(capacity: int) -> None:
    index = DraftIndex(capacity)
    text = index.open([1] * 9, 0)
    index.extend(text, [1])
    assert (index.num_ids, index.find(text)) == (0, None)
