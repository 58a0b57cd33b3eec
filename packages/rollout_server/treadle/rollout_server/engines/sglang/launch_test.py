import os
from pathlib import Path

import pytest

from treadle.rollout_server.engines.sglang.launch import modules_without, set_rendezvous_file


def test_only_modules_that_mention_a_model_are_left(tmp_path: Path) -> None:
    for name, text in {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}.items():
        (tmp_path / f"{name}.py").write_text(f"class {text}: ...")
    assert modules_without("LlamaForCausalLM", tmp_path) == ["qwen2"]
    assert modules_without("UnknownForCausalLM", tmp_path) == []


def test_a_server_of_one_rank_meets_itself_at_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_rendezvous_file(tmp_path / "rank")
    assert os.environ == {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{tmp_path}/rank"}
    set_rendezvous_file(tmp_path / "other")  # Nor does it change what is set.
    assert os.environ == {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{tmp_path}/rank"}
