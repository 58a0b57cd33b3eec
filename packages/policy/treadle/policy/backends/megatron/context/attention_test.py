from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treadle.policy.backends.megatron.attention import ScoreRule
from treadle.policy.backends.megatron.context.attention import ContextSegments
from treadle.policy.backends.megatron.context.rows import row_multiple, rows_of_ranks
from treadle.policy.backends.megatron.prefixes.attention import TreeSegments
from treadle.policy.backends.megatron.prefixes.tree import runs_of
from treadle.policy.client.prefixes import in_order, overlaps_of

SCORES = ScoreRule(scale=0.5)
trees = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple), min_size=1, max_size=6
)


class Place:
    """A rank's place in a context group that exchanges nothing."""

    def __init__(self, ranks: int, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._rank


@contextmanager
def in_one_process(key: Tensor, value: Tensor, received: list[Tensor]) -> Iterator[None]:
    """Gives every rank all keys and values, and takes the gradients that it would send."""

    def gather(_: Any, __: Tensor, ___: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def reduce(_: Any, grads: Tensor) -> Tensor:
        received[0] += grads[:, 0]
        received[1] += grads[:, 1]
        return torch.zeros(1, 2, 1, 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextSegments, "gather", gather)
        patch.setattr(ContextSegments, "reduce", reduce)
        yield


@settings(max_examples=60, deadline=None)
@given(paths=trees, ranks=st.sampled_from([2, 3, 4]), shared=st.booleans())
def test_the_ranks_of_a_context_group_compute_what_one_computes(
    paths: list[tuple[int, ...]], ranks: int, shared: bool
) -> None:
    ids = [paths[i] for i in in_order(paths)]
    lengths = [len(path) for path in ids]
    overlaps = overlaps_of(ids) if shared else [0] * len(ids)
    used = sum(lengths) - sum(overlaps)
    padding = -used % row_multiple(ranks)
    own = [range(o, n) for o, n in zip(overlaps, lengths, strict=True)]
    positions = [t for ts in own for t in ts] + [0] * padding
    torch.manual_seed(used)
    query = torch.randn(len(positions), 4, 8, requires_grad=True)
    key, value = (torch.randn(len(positions), 2, 8, requires_grad=True) for _ in range(2))
    upstream = torch.randn(len(positions), 32)
    cpu = torch.device("cpu")
    whole = torch.cat((query, key, value), 1)
    want = TreeSegments.of_tree(lengths, overlaps, cpu).attend(whole, (4, 2, 2), SCORES)
    want_grads = torch.autograd.grad(want, (query, key, value), upstream)

    parts = rows_of_ranks(positions, ranks)
    got, grad_query = torch.zeros_like(want), torch.zeros_like(query)
    received = [torch.zeros_like(key), torch.zeros_like(value)]
    for rank in range(ranks):
        group: Any = Place(ranks, rank)
        rows = torch.tensor([row for rows in parts[rank] for row in rows])
        segments = ContextSegments.of_runs(runs_of(lengths, overlaps), parts, group, cpu)
        q, k, v = (x[rows].detach().requires_grad_() for x in (query, key, value))
        with in_one_process(key.detach(), value.detach(), received):
            out = segments.attend(torch.cat((q, k, v), 1), (4, 2, 2), SCORES)
            grads = torch.autograd.grad(out, (q, k, v), upstream[rows])
        got[rows] = out.detach()
        grad_query[rows] = grads[0]
        for into, part in zip(received, grads[1:], strict=True):
            into[rows] += part
    torch.testing.assert_close(got, want.detach(), atol=1e-5, rtol=0)
    for g, w in zip((grad_query, *received), want_grads, strict=True):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-5)
