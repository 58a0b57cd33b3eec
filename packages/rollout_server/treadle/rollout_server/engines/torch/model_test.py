import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.rollout_server.engine import ElementType, TensorSpec
from treadle.rollout_server.engines.torch.harness import ModelDir
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource


def load(path: Path, dtype: ElementType = ElementType.FLOAT32) -> CachedModel:
    return CachedModel(ModelSource(path=path, dtype=dtype, device="cpu"))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"model_type": "mistral"}, "'mistral' is not taken.*llama, qwen2, qwen3"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "has sliding_attention layers",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding 'dynamic'",
        ),
    ],
)
def test_models_of_another_kind_are_refused(
    architecture: str,
    changes: dict[str, Any],
    message: str,
    model_dir: ModelDir,
    tmp_path: Path,
) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir(architecture), path)
    config = json.loads((path / "config.json").read_text())
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        load(path)


def test_parameters_leave_out_a_tied_head(model_dir: ModelDir) -> None:
    tied = {spec.name: spec for spec in load(model_dir("qwen2")).parameters}
    untied = {spec.name: spec for spec in load(model_dir("qwen3")).parameters}
    assert "lm_head.weight" not in tied
    assert untied["lm_head.weight"].shape == (61, 32)
    assert tied["model.norm.weight"].label == "float32[32]"


def test_staged_tensors_are_copies_in_the_held_type(model_dir: ModelDir) -> None:
    model = load(model_dir(), ElementType.BFLOAT16)
    source = torch.tensor([1.0, 2.5])
    data = bytearray(source.numpy().tobytes())
    spec = TensorSpec(name="x", element_type=ElementType.FLOAT32, shape=(2, 1))
    staged = model.stage(spec, memoryview(data))
    data[:] = bytes(len(data))
    assert staged.dtype is torch.bfloat16
    assert staged.tolist() == [[1.0], [2.5]]


def test_a_checkpoint_that_lacks_weights_is_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir("qwen3"), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 2 weights of the model, 'lm_head\.weight'"):
        load(path)


def test_a_missing_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        load(tmp_path)
