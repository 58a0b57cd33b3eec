import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec

import pytest

from treadle.rollout_server.engines.common.missing_modules import (
    MissingKernels,
    torchvision_stand_in,
)


def test_missing_kernels_can_be_imported_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_kernel", MissingKernels("some_kernel"))
    assert isinstance(importlib.util.find_spec("some_kernel"), ModuleSpec)
    kernel = importlib.import_module("some_kernel")
    with pytest.raises(NotImplementedError, match=r"some_kernel\.fused has no CPU build"):
        kernel.fused(1)


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here"
)
def test_torchvision_stands_in_for_a_block_only() -> None:
    with torchvision_stand_in():
        functional = importlib.import_module("torchvision.transforms.v2").functional
        with pytest.raises(NotImplementedError, match=r"functional\.resize has no CPU build"):
            functional.resize(1)
    assert importlib.util.find_spec("torchvision") is None
