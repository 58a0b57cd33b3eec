import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.policy.backends.megatron.attention import ScoreRule
from treadle.policy.backends.megatron.prefixes import attention
from treadle.policy.backends.megatron.prefixes.attention import TreeSegments
from treadle.policy.backends.megatron.prefixes.tree import rows_of_paths
from treadle.policy.client.prefixes import in_order, overlaps_of

trees = st.lists(
    st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple), min_size=1, max_size=8
)


@pytest.mark.parametrize("kernel", ["flash", "plain"])
@settings(max_examples=40, deadline=None)
@given(paths=trees, padding=st.integers(0, 3))
def test_a_row_attends_to_its_path(kernel: str, paths: list[tuple[int, ...]], padding: int) -> None:
    """Against softmax with a dense mask, gradients included."""
    ids = [paths[i] for i in in_order(paths)]
    lengths, overlaps = [len(path) for path in ids], overlaps_of(ids)
    used = sum(lengths) - sum(overlaps)
    mask = torch.zeros(used, used)
    for rows in rows_of_paths(lengths, overlaps):
        for place, row in enumerate(rows):
            mask[row, rows[: place + 1]] = 1.0
    torch.manual_seed(used)
    query = torch.randn(used + padding, 4, 8, requires_grad=True)
    key, value = (torch.randn(used + padding, 2, 8, requires_grad=True) for _ in range(2))

    tree = TreeSegments.of_tree(lengths, overlaps, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "plain":  # what a GPU computes, in blocks of 5
            patch.setattr(attention, "_forward", attention.plain_forward)
            patch.setattr(attention, "_backward", attention.plain_backward)
            patch.setattr(attention, "_QUERIES_AT_ONCE", 5)
        got = tree.attend(torch.cat((query, key, value), 1), (4, 2, 2), ScoreRule(scale=0.5))
        upstream = torch.randn_like(got)
        got_grads = torch.autograd.grad(got, (query, key, value), upstream)

    q, k, v = (x[:used].transpose(0, 1) for x in (query, key, value))
    k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
    weights = (q @ k.transpose(1, 2) * 0.5 + mask.log()).softmax(-1)
    want = torch.cat([(weights @ v).transpose(0, 1).flatten(1), torch.zeros(padding, 32)])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    for g, w in zip(
        got_grads, torch.autograd.grad(want, (query, key, value), upstream), strict=True
    ):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-5)


def test_padding_of_a_group_reaches_nothing_even_where_scores_are_huge() -> None:
    """A padded place repeats its run's last row: exp(score - l) cannot overflow there."""
    lengths, overlaps = [40, 42, 50], [0, 30, 30]
    tree = TreeSegments.of_tree(lengths, overlaps, torch.device("cpu"))
    assert any(group.padding is not None for group in tree.own)
    torch.manual_seed(0)
    query, key, value = ((torch.randn(72, 2, 8) * 100).requires_grad_() for _ in range(3))
    out = tree.attend(torch.cat((query, key, value), 1), (2, 2, 2), ScoreRule(scale=1.0))
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(bool(torch.isfinite(x).all()) for x in (out, *grads))
