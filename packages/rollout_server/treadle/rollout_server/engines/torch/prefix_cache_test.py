from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engines.torch.prefix_cache import PrefixCache, common_tokens, prefix_key

IDS = st.lists(st.sampled_from([0, 1, 255, 256, 70_000]), min_size=1, max_size=6)


def shared(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


@given(IDS, IDS)
def test_common_tokens_counts_whole_ids(left: list[int], right: list[int]) -> None:
    assert common_tokens(prefix_key(left), prefix_key(right)) == shared(left, right)


@given(st.lists(IDS, max_size=12), IDS)
def test_the_longest_prefix_over_all_entries_is_found(
    stored: list[list[int]], ids: list[int]
) -> None:
    cache: PrefixCache[str] = PrefixCache(0)
    for entry in stored:
        cache.add_live(prefix_key(entry), str(entry))
    found, holder = cache.longest(prefix_key(ids))
    assert found == max((shared(entry, ids) for entry in stored), default=0)
    assert (holder is None) == (found == 0)
    if holder is not None:
        assert any(str(entry) == holder and shared(entry, ids) == found for entry in stored)


@given(st.lists(st.tuples(IDS, st.booleans()), max_size=30))
def test_retained_bytes_stay_within_the_capacity(entries: list[tuple[list[int], bool]]) -> None:
    cache: PrefixCache[object] = PrefixCache(40)
    live: dict[bytes, object] = {}
    for ids, retained in entries:
        key, holder = prefix_key(ids), object()
        if not retained:
            cache.add_live(key, holder)
            live.setdefault(key, holder)
        elif cache.wants(key, len(key)):
            cache.retain(key, holder, len(key))
            assert cache.longest(key)[0] == len(ids)
        assert cache.retained_bytes <= 40
        assert all(cache.longest(k)[0] == len(k) // 4 for k in live)
    for key, holder in live.items():
        cache.remove_live(key, holder)
    cache.clear()
    assert (len(cache), cache.retained_bytes) == (0, 0)


def test_the_least_recently_used_entry_goes_first() -> None:
    cache: PrefixCache[str] = PrefixCache(8)
    cache.retain(prefix_key([1]), "one", 4)
    cache.retain(prefix_key([2]), "two", 4)
    cache.longest(prefix_key([1, 9]))
    cache.retain(prefix_key([3]), "three", 4)
    assert cache.longest(prefix_key([1])) == (1, "one")
    assert cache.longest(prefix_key([2])) == (0, None)


def test_a_longer_entry_replaces_those_it_covers_and_makes_new_ones_superfluous() -> None:
    cache: PrefixCache[str] = PrefixCache(100)
    cache.retain(prefix_key([1]), "turn 1", 4)
    cache.retain(prefix_key([1, 2, 3]), "turn 2", 12)
    assert len(cache) == 1
    assert not cache.wants(prefix_key([1, 2]), 8)
    assert cache.wants(prefix_key([1, 4]), 8)
    assert cache.longest(prefix_key([1, 7])) == (1, "turn 2")


def test_what_is_larger_than_the_whole_cache_is_not_wanted() -> None:
    assert not PrefixCache[str](0).wants(prefix_key([1]), 4)


def test_a_live_entry_is_removed_only_by_its_own_holder() -> None:
    cache: PrefixCache[str] = PrefixCache(0)
    cache.add_live(prefix_key([5]), "leader")
    cache.add_live(prefix_key([5]), "sibling")
    cache.remove_live(prefix_key([5]), "sibling")
    assert cache.longest(prefix_key([5])) == (1, "leader")
    cache.remove_live(prefix_key([5]), "leader")
    assert cache.longest(prefix_key([5])) == (0, None)
