"""Storages leave and come back under all views of them."""

import random

import torch

from treadle.policy.backends.offload import Offload


def test_views_stay_valid_and_bits_come_back() -> None:
    bits = torch.tensor(random.Random(3).choices(range(-(2**31), 2**31), k=1000)).int()
    flat = bits.view(torch.float32).clone()  # some are NaN
    view = flat[100:900].view(40, 20).t()
    gradients = torch.ones(500)
    offload = Offload(
        {"parameters": lambda: [view, flat], "gradients": lambda: [gradients], "reference": tuple}
    )
    offload.release_all()
    offload.release_all()
    assert flat.untyped_storage().size() == gradients.untyped_storage().size() == 0
    assert (offload.take_report().freed_bytes, offload.take_report().host_bytes) == (6000, 4000)
    offload.restore("parameters", "optimizer")
    assert torch.equal(flat.view(torch.int32), bits)
    assert torch.equal(view, flat[100:900].view(40, 20).t()) or bool(view.isnan().any())
    assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert gradients.untyped_storage().size() == 0
    offload.restore("gradients")
    assert gradients.fill_(2.0).sum() == 1000
