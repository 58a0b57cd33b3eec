import importlib
import importlib.util
import os
import pickle
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from treadle.rollout_server.engines.sglang import shims
from treadle.rollout_server.engines.sglang.startup import ProcessSetup, meet_at, modules_without


def test_only_modules_that_mention_a_model_are_left(tmp_path: Path) -> None:
    for name, text in {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}.items():
        (tmp_path / f"{name}.py").write_text(f"class {text}: ...")
    assert modules_without("LlamaForCausalLM", tmp_path) == ["qwen2"]
    assert modules_without("UnknownForCausalLM", tmp_path) == []


def test_a_process_is_prepared_by_what_it_unpickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[bool] = []
    monkeypatch.setattr(shims, "install", lambda: prepared.append(True))
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
    monkeypatch.setitem(sys.modules, "some_kernel", shims.MissingKernels("some_kernel"))
    assert isinstance(importlib.util.find_spec("some_kernel"), ModuleSpec)
    kernel = importlib.import_module("some_kernel")
    with pytest.raises(NotImplementedError, match=r"some_kernel\.fused has no CPU build"):
        kernel.fused(1)


def test_a_server_of_one_rank_meets_itself_at_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    meet_at(tmp_path / "rank")
    assert os.environ == {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{tmp_path}/rank"}
    meet_at(tmp_path / "other")  # Nor does it change what is set.
    assert os.environ == {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{tmp_path}/rank"}
