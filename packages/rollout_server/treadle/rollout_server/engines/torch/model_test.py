import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from treadle.rollout_server.engine import ElementType, NamedTensor, TensorSpec
from treadle.rollout_server.engines.torch.model import CachedModel, ModelSource
from treadle.rollout_server.engines.torch.testing.text_model import ModelDir


def load(path: Path, dtype: ElementType = ElementType.FLOAT32) -> CachedModel:
    return CachedModel(ModelSource(path=path, dtype=dtype, device="cpu"))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"model_type": "t5"}, "'t5' is not supported.*decoders of text"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "has chunked_attention layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "does not sample token by token"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}},
            "rotary embedding 'dynamic'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding 'dynamic'",
        ),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantised .* vllm or sglang"),
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


def test_weights_in_fp8_are_read_with_their_scales(model_dir: ModelDir, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir("llama"), path)
    stored, means = load_file(path / "model.safetensors"), {}
    for name in [name for name in stored if "_proj.weight" in name]:
        codes = stored[name].to(torch.float8_e4m3fn)
        stored |= {name: codes, f"{name}_scale_inv": torch.full((1, 1), 2.0)}
        means[name] = codes.float() * 2.0
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    method = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    held = load(path)._parameters
    assert means
    for name, weight in means.items():
        assert torch.equal(held[name], weight), name


def test_scales_that_the_config_does_not_name_are_refused(
    model_dir: ModelDir, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir("llama"), path)
    stored = load_file(path / "model.safetensors")
    name = next(name for name in stored if "down_proj" in name)
    stored[f"{name}_scale_inv"] = torch.ones(1)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"quantised .it has {name}_scale_inv"):
        load(path)


def test_a_gpu_that_is_not_there_is_refused(
    model_dir: ModelDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = ModelSource(path=model_dir(), dtype=ElementType.FLOAT32, device="cuda")
    with pytest.raises(
        ValueError, match=r"model\.device is 'cuda'.*set model.device to auto or cpu"
    ):
        CachedModel(source)


def test_parameters_leave_out_a_tied_head(model_dir: ModelDir) -> None:
    tied = {spec.name: spec for spec in load(model_dir("qwen2")).parameters}
    untied = {spec.name: spec for spec in load(model_dir("qwen3")).parameters}
    assert "lm_head.weight" not in tied
    assert untied["lm_head.weight"].shape == (61, 32)
    assert tied["model.norm.weight"].label == "float32[32]"


def test_experts_are_written_by_their_names_in_a_checkpoint(model_dir: ModelDir) -> None:
    first, second = model_dir("qwen3_moe"), model_dir("qwen3_moe", seed=1)
    model, other = load(first), load(second)
    published = load_file(second / "model.safetensors")
    assert {spec.name: spec.shape for spec in model.parameters} == {
        name: tuple(tensor.shape) for name, tensor in published.items()
    }
    model.release_weights()
    model.restore_weights()
    with torch.inference_mode():
        for name, tensor in published.items():
            model.overwrite(name, tensor)
    for got, want in zip(model._model.parameters(), other._model.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_written_tensor_is_copied_in_the_held_type(model_dir: ModelDir) -> None:
    model = load(model_dir(), ElementType.BFLOAT16)
    source = torch.arange(32) + 0.5
    data = bytearray(source.numpy().tobytes())
    name = "model.norm.weight"
    spec = TensorSpec(name=name, element_type=ElementType.FLOAT32, shape=(32,))
    with torch.inference_mode():
        model.write(NamedTensor(spec=spec, data=memoryview(data)))
    data[:] = bytes(len(data))
    held = model._parameters[name]
    assert held.dtype is torch.bfloat16
    assert held.tolist() == source.tolist()


def test_a_checkpoint_that_lacks_weights_is_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(model_dir("qwen3"), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"], tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks 2 weights of the model, for example 'lm_head\.weight'"
    ):
        load(path)


def test_a_missing_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        load(tmp_path)
