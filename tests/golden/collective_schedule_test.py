"""The schedule of collective weight updates, against `collective_schedule.json`.

Servers in other languages compute the same numbers from the file.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.rollout.collective_schedule import Bucket, schedule

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "collective_schedule.json").read_text()
)


def plain(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    """As in the file."""
    return [
        {
            "sender": bucket.sender,
            "num_bytes": bucket.num_bytes,
            "parts": [[part.index, part.start, part.num_bytes] for part in bucket.parts],
        }
        for bucket in buckets
    ]


@pytest.mark.parametrize("case", CASES, ids=[case["title"] for case in CASES])
def test_the_schedule_is_the_table(case: dict[str, Any]) -> None:
    arguments = case["sizes"], case["senders"], case["bucket_bytes"]
    assert plain(schedule(*arguments)) == case["buckets"]


@given(
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 300),
)
def test_any_announcement_is_cut_whole(tensors: list[tuple[int, int]], bucket_bytes: int) -> None:
    sizes, senders = zip(*tensors, strict=True)
    buckets = schedule(sizes, senders, bucket_bytes)
    parts = [(bucket.sender, part) for bucket in buckets for part in bucket.parts]
    assert sorted(part.index for _, part in parts) == list(range(len(sizes)))
    for sender, part in parts:
        assert (sender, part.num_bytes) == (senders[part.index], sizes[part.index])
    for bucket in buckets:
        assert bucket.num_bytes <= bucket_bytes or len(bucket.parts) == 1
        ends = [part.start + part.num_bytes for part in bucket.parts]
        assert all(part.start % 16 == 0 for part in bucket.parts)
        starts = [part.start for part in bucket.parts[1:]]
        assert all(end <= start for end, start in zip(ends[:-1], starts, strict=True))
        assert ends[-1] == bucket.num_bytes
    for sender in set(senders):
        in_order = [part.index for who, part in parts if who == sender]
        assert in_order == sorted(in_order)
