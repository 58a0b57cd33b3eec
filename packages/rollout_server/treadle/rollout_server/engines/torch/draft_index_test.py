from array import array
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from treadle.rollout_server.engines.torch.draft_index import (
    MOST_AGREEMENT,
    ORDERS,
    DraftIndex,
    DraftText,
)

IDS = st.lists(st.integers(0, 3), max_size=12)


def collide(index: DraftIndex, texts: Sequence[Sequence[int]]) -> bool:
    """Whether two n-grams of texts have one slot."""
    ngrams = {
        tuple(text[place - order : place])
        for text in texts
        for order in ORDERS
        for place in range(order, len(text) + 1)
    }
    return len({index.slot(array("i", ngram)) for ngram in ngrams}) < len(ngrams)


def followers(end: Sequence[int], texts: Sequence[Sequence[int]]) -> set[int]:
    """What follows an n-gram anywhere."""
    order = len(end)
    return {
        text[place]
        for text in texts
        for place in range(order, len(text))
        if list(text[place - order : place]) == list(end)
    }


@given(st.lists(st.tuples(st.integers(0, 3), IDS), max_size=12))
def test_it_predicts_what_has_followed_in_some_text(steps: list[tuple[int, list[int]]]) -> None:
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
            predicted = {p.order: p.token_id for p in index.predictions(text.ids)}
            for number, order in enumerate(ORDERS):
                end = held[name][-order:] if order <= len(held[name]) else None
                wanted = set() if end is None else followers(end, list(held.values()))
                assert (number in predicted) == bool(wanted)
                assert number not in predicted or predicted[number] in wanted


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
            assert all(0 <= p.token_id <= 3 for p in index.predictions(text.ids))


def test_the_newest_continuation_is_predicted_with_its_repetitions() -> None:
    index = DraftIndex(10_000)
    ngram = array("i", range(ORDERS[-2]))
    for token_id, agreement in ((50, 0), (50, 1), (50, 2), (60, 0), (60, 1), (50, 0)):
        index.open([*ngram, token_id], 0)
        first = next(index.predictions(ngram))
        assert (ORDERS[first.order], first.token_id) == (len(ngram), token_id)
        assert first.agreement == agreement
    for _ in range(2 * MOST_AGREEMENT):
        index.open([*ngram, 50], 0)
    assert next(index.predictions(ngram)).agreement == MOST_AGREEMENT


def test_ids_that_were_entered_before_are_read_as_context_only() -> None:
    index = DraftIndex(100)
    ngram = array("i", range(ORDERS[-2]))
    index.open([*ngram, 50], len(ngram) + 1)
    assert not list(index.predictions(ngram))
    index.open([*ngram, 50], len(ngram))
    assert {p.token_id for p in index.predictions(ngram)} == {50}


@pytest.mark.parametrize("capacity", [1, 5])
def test_a_text_that_is_too_long_is_not_held(capacity: int) -> None:
    index = DraftIndex(capacity)
    text = index.open([1] * 9, 0)
    index.extend(text, [1])
    assert (index.num_ids, list(index.predictions(text.ids))) == (0, [])


def test_a_text_that_grows_outlives_those_that_have_ended() -> None:
    index = DraftIndex(20)
    running = index.open([1, 2], 0)
    for other in range(10, 20):
        index.open([other] * 5, 0)
        index.extend(running, [1])
        assert {p.token_id for p in index.predictions(array("i", [2]))} == {1}
    assert len(running.ids) == 12


def test_a_text_that_was_dropped_takes_no_slot_of_another() -> None:
    index = DraftIndex(10)
    dropped = index.open([4, 5, 6, 7, 8, 9], 0)
    index.open([7, 1, 2, 3, 50], 0)
    index.extend(dropped, [1, 2, 3, 60])
    assert dropped.ids[-1] == 60
    assert {p.token_id for p in index.predictions(array("i", [1, 2, 3]))} == {50}
