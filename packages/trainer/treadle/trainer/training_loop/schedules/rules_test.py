"""The rules of the schedules, in the order of events that a long tail gives."""

import random

import pytest

from treadle.trainer.training_loop.schedules.group_queue import GroupQueue, Rule
from treadle.trainer.training_loop.schedules.rules import AsyncRule, OverlapRule, StreamRule
from treadle.trainer.training_loop.schedules.testing import group_of

_TOTAL_STEPS = 12


def _queue(rule: Rule, *, size: int = 2) -> GroupQueue:
    return GroupQueue(rule=rule, size=size, total_steps=_TOTAL_STEPS)


def _start_all(queue: GroupQueue) -> list[int]:
    started = []
    while queue.may_start():
        started.append(queue.start())
    return started


def _end(queue: GroupQueue, *numbers: int) -> None:
    for number in numbers:
        queue.end(number, group_of(number))


def _train(queue: GroupQueue) -> list[int]:
    """Forms the next batch and publishes its step; returns its numbers."""
    batch = queue.form()
    assert batch is not None
    queue.published(queue.version + 1)
    return [waiting.number for waiting in batch]


@pytest.mark.parametrize("bound", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(9))
def test_no_group_is_older_than_max_staleness_and_nothing_stands_still(
    bound: int, seed: int
) -> None:
    choices, size = random.Random(seed), seed % 3 + 1
    queue = _queue(AsyncRule(bound), size=size)
    ages = []
    while queue.version < _TOTAL_STEPS:
        _start_all(queue)
        if queue.training and (not queue.running or choices.random() < 0.5):
            queue.published(queue.version + 1)
        elif not queue.training and (batch := queue.form()) is not None:
            ages += [queue.version - waiting.birth for waiting in batch]
            assert len(batch) == size
        else:
            # The newest groups end first, as if the old ones had the slow tools.
            number = max(queue.running) if choices.random() < 0.9 else min(queue.running)
            _end(queue, number)
            if choices.random() < 0.1:
                queue.leave_out(number)
    assert max(ages) <= bound


def test_async_waits_for_a_straggler_before_it_becomes_too_old() -> None:
    queue = _queue(AsyncRule(1))
    assert _start_all(queue) == [0, 1, 2, 3]
    _end(queue, 2, 3)
    assert _train(queue) == [2, 3]
    assert _start_all(queue) == [4, 5]
    _end(queue, 4, 5)
    assert queue.form() is None, "0 and 1 have staleness 1 in this step, and 2 in the next"
    _end(queue, 0)
    assert queue.form() is None
    _end(queue, 1)
    assert _train(queue) == [0, 1]


def test_async_starts_groups_while_a_step_trains() -> None:
    queue = _queue(AsyncRule(1))
    _end(queue, *_start_all(queue)[:2])
    assert queue.form() is not None
    assert _start_all(queue) == [], "2 groups train and 2 run: as many as the bound allows"
    queue.published(1)
    assert _start_all(queue) == [4, 5]


def test_stream_carries_over_what_has_not_ended() -> None:
    queue = _queue(StreamRule(0.5))
    assert _start_all(queue) == [0, 1, 2]
    _end(queue, 2, 1)
    assert _train(queue) == [1, 2]
    assert _start_all(queue) == [3, 4]
    _end(queue, 3, 4)
    assert _train(queue) == [3, 4], "0 is not waited for"
    _end(queue, 0)
    assert _start_all(queue) == [5, 6]
    _end(queue, 5)
    assert _train(queue) == [0, 5]


def test_overlap_begins_the_rows_of_a_step_when_the_one_before_trains() -> None:
    queue = _queue(OverlapRule())
    assert _start_all(queue) == [0, 1]
    _end(queue, 1)
    assert queue.form() is None
    _end(queue, 0)
    assert queue.form() is not None
    assert _start_all(queue) == [2, 3]
    _end(queue, 3, 2)
    queue.published(1)
    assert _start_all(queue) == []
    assert [(w.number, queue.version - w.birth) for w in queue.form() or ()] == [(2, 1), (3, 1)]


@pytest.mark.parametrize("rule", [OverlapRule(), StreamRule(2.0), AsyncRule(3)])
def test_nothing_is_begun_that_no_step_trains_on(rule: Rule) -> None:
    queue = _queue(rule)
    while queue.version < _TOTAL_STEPS:
        _end(queue, *_start_all(queue))
        _train(queue)
    assert queue.next_number == 2 * _TOTAL_STEPS
    assert not queue.num_untrained
