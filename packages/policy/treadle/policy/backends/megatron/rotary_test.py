import pytest
import torch
from torch import Tensor

from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.rotary import RowRotation

device.install()

from megatron.core.models.common.embeddings.rope_utils import (  # noqa: E402
    _apply_rotary_pos_emb_bshd,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("turned", "more"), [(8, None), (4, None), (8, (4, 1.5))])
def test_rows_are_turned_as_megatron_turns_them(
    dtype: torch.dtype, interleaved: bool, turned: int, more: tuple[int, float] | None
) -> None:
    """Bit for bit, the gradient too, though it computes the angles of a row in each layer."""
    torch.manual_seed(0)
    angles_PR = torch.randn(11, turned // 2) * 30
    query = torch.randn(11, 4, 8).to(dtype).requires_grad_()
    key, value = (torch.randn(11, 2, 8).to(dtype).requires_grad_() for _ in range(2))

    def by_megatron(x_PAD: Tensor) -> Tensor:
        angles = angles_PR.repeat_interleave(2, -1) if interleaved else angles_PR.repeat(1, 2)
        rows = _apply_rotary_pos_emb_bshd(
            x_PAD[:, None], angles[:, None, None], rotary_interleaved=interleaved
        )
        turned: Tensor = rows[:, 0]
        return turned

    of_query = by_megatron(query)
    if more is not None:
        of_query = torch.cat((of_query[..., : more[0]] * more[1], of_query[..., more[0] :]), -1)
    want = torch.cat((of_query, by_megatron(key), value), 1)
    got = RowRotation.of_angles(angles_PR, dtype, interleaved=interleaved).join(
        query, key, value, more
    )
    assert torch.equal(got, want)
    upstream = torch.randn_like(want)
    for g, w in zip(
        torch.autograd.grad(got, (query, key, value), upstream),
        torch.autograd.grad(want, (query, key, value), upstream),
        strict=True,
    ):
        assert torch.equal(g, w)
