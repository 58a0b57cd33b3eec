from collections.abc import Sequence as Ids

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout_server.engine import EngineRequest, Sampling
from treadle.rollout_server.engines.torch.scheduler import Scheduler
from treadle.rollout_server.engines.torch.sequence import Sequence


def sequence(prompt: Ids[int], priority: int = 0) -> Sequence:
    request = EngineRequest(
        request_id="r", prompt=tuple(prompt), sampling=Sampling(max_tokens=9), priority=priority
    )
    return Sequence(request=request, sink=lambda _: None, seed=0, stop_ids=frozenset())


def nothing_cached(_: bytes) -> int:
    return 0


def read_one_step(scheduler: Scheduler) -> None:
    """What the core does in a step, without a model."""
    for work in scheduler.plan():
        work.sequence.num_cached += work.num_ids
        if not work.sequence.num_uncached:
            scheduler.prefill_done(work.sequence)
            work.sequence.ids.append(0)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("submit"), st.integers(1, 9)),
            st.tuples(st.just("step"), st.just(0)),
            st.tuples(st.just("remove"), st.integers(0, 5)),
        ),
        max_size=40,
    )
)
def test_rows_have_no_holes_and_moves_carry_their_content(ops: list[tuple[str, int]]) -> None:
    scheduler = Scheduler(max_rows=4, max_step_tokens=6)
    content: dict[int, Sequence] = {}
    for name, number in ops:
        if name == "submit":
            scheduler.submit(sequence(range(number)))
        elif name == "step":
            for admitted in scheduler.admit(nothing_cached):
                assert admitted.row is not None
                content[admitted.row] = admitted
            decoding = [s for s in scheduler.running if s.num_sampled]
            planned = [work.sequence for work in scheduler.plan()]
            assert planned == scheduler.running[: len(planned)]
            assert set(map(id, decoding)) <= set(map(id, planned))
            read_one_step(scheduler)
        elif scheduler.running:
            leaving = scheduler.running[number % len(scheduler.running)]
            for move in scheduler.remove(leaving):
                content[move.target] = content[move.source]
            assert leaving.row is None
        for row, running in enumerate(scheduler.running):
            assert running.row == row and content[row] is running
        assert len(scheduler.running) <= 4
        decodes = [bool(s.num_sampled) for s in scheduler.running]
        assert decodes == sorted(decodes, reverse=True)


def test_higher_priority_first_then_first_come() -> None:
    scheduler = Scheduler(max_rows=3, max_step_tokens=100)
    low, high, also_high = sequence([1]), sequence([2], 5), sequence([3], 5)
    for one in (low, high, also_high):
        scheduler.submit(one)
    assert list(scheduler.admit(nothing_cached)) == [high, also_high, low]


def test_a_step_reads_no_more_than_it_may_and_decoding_goes_first() -> None:
    scheduler = Scheduler(max_rows=4, max_step_tokens=10)
    first = sequence(range(4))
    scheduler.submit(first)
    list(scheduler.admit(nothing_cached))
    read_one_step(scheduler)
    long, late = sequence(range(100, 125)), sequence([7])
    scheduler.submit(long)
    scheduler.submit(late)
    assert list(scheduler.admit(nothing_cached)) == [long]
    assert [work.num_ids for work in scheduler.plan()] == [1, 9]
    read_one_step(scheduler)
    read_one_step(scheduler)
    assert list(scheduler.admit(nothing_cached)) == [late]
    assert [work.num_ids for work in scheduler.plan()] == [1, 7, 1]


def test_siblings_wait_for_the_one_that_reads_their_prompt() -> None:
    scheduler = Scheduler(max_rows=8, max_step_tokens=1000)
    prompt = range(1, 101)
    leader, *siblings = [sequence(prompt) for _ in range(4)]
    stranger = sequence(range(500, 600))
    for one in (leader, *siblings, stranger):
        scheduler.submit(one)
    assert list(scheduler.admit(nothing_cached)) == [leader, stranger]
    read_one_step(scheduler)
    assert list(scheduler.admit(lambda _: 100)) == siblings


def test_siblings_do_not_wait_for_what_the_cache_has_already() -> None:
    scheduler = Scheduler(max_rows=8, max_step_tokens=1000)
    for _ in range(3):
        scheduler.submit(sequence(range(100)))
    assert len(list(scheduler.admit(lambda _: 90))) == 3


def test_siblings_go_on_when_the_leader_is_removed() -> None:
    scheduler = Scheduler(max_rows=8, max_step_tokens=1000)
    leader, sibling = sequence(range(100)), sequence(range(100))
    scheduler.submit(leader)
    scheduler.submit(sibling)
    assert list(scheduler.admit(nothing_cached)) == [leader]
    scheduler.remove(leader)
    assert list(scheduler.admit(nothing_cached)) == [sibling]


def test_withdrawn_and_drained_sequences_do_not_run() -> None:
    scheduler = Scheduler(max_rows=8, max_step_tokens=1000)
    gone, stays = sequence([1]), sequence([2])
    scheduler.submit(gone)
    scheduler.submit(stays)
    scheduler.withdraw(gone)
    assert scheduler.drain_waiting() == [stays]
    assert scheduler.num_waiting == 0


def test_a_step_too_small_for_the_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens must be at least max_rows, got 3 and 4"):
        Scheduler(max_rows=4, max_step_tokens=3)
