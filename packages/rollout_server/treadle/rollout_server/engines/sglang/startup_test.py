import importlib
import importlib.util
import os
import pickle
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from treadle.rollout_server.engines.sglang import startup
from treadle.rollout_server.engines.sglang.startup import MissingKernels, ProcessSetup


def test_a_process_is_prepared_by_what_it_unpickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(startup, "install_stubs", lambda: prepared.append(True))
    setup = ProcessSetup(True, tmp_path)
    assert pickle.loads(pickle.dumps(setup)) == setup
    assert prepared == [True, True]
    ProcessSetup(False, tmp_path)
    assert len(prepared) == 2


def test_a_process_leaves_the_cause_of_its_end(tmp_path: Path) -> None:
    setup = ProcessSetup(False, tmp_path)
    setup.report(RuntimeError("no room"))
    assert (tmp_path / str(os.getpid())).read_text() == "RuntimeError: no room"


def test_missing_kernels_can_be_imported_and_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_kernel", MissingKernels("some_kernel"))
    assert isinstance(importlib.util.find_spec("some_kernel"), ModuleSpec)
    kernel = importlib.import_module("some_kernel")
    with pytest.raises(NotImplementedError, match=r"some_kernel\.fused has no CPU build"):
        kernel.fused(1)
