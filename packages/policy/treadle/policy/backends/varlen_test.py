import pytest
import torch

from treadle.policy.backends import varlen
from treadle.policy.backends.varlen import Bounds


def test_a_cpu_has_no_such_kernel() -> None:
    rows = torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    assert not varlen.can_attend(rows, rows)


@pytest.mark.parametrize("window", [None, 4])
def test_the_call_is_one_that_the_kernel_takes(window: int | None) -> None:
    """On the device that computes shapes only: names and order of arguments, and the backward."""
    bounds = Bounds.of_lengths([2, 3, 6], torch.device("cpu"))
    assert bounds.offsets_N.tolist() == [0, 2, 5, 11]
    assert (bounds.longest, bounds.rows) == (6, 11)
    joined = torch.empty(11, 8, 16, dtype=torch.bfloat16, device="meta").requires_grad_()
    query, key, value = joined.split((4, 2, 2), 1)
    on_meta = Bounds(bounds.offsets_N.to("meta"), bounds.longest, bounds.rows)
    out = varlen.attend(query, key, value, on_meta, scale=0.5, window=window)
    assert out.shape == query.shape
    (grad,) = torch.autograd.grad(out, joined, torch.empty_like(out))
    assert grad.shape == joined.shape
