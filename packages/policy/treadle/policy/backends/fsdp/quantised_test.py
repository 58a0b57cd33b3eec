"""Models that are published quantised are read with their scales, and written whole."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from treadle.policy.backend import Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fsdp.description import FsdpDescription
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.testing.any_model import write_any
from treadle.policy.testing.state_contract import LOSS
from treadle.policy.testing.tiny import sequences

BLOCK: Final = 16
FP8: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
MXFP4: Final = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def in_fp8(name: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    """Returns what is stored of a matrix, and what it means."""
    rows, columns = (n // BLOCK for n in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    means = (codes.float() * scales[:, None, :, None]).reshape(weight.shape)
    return {name: codes.reshape(weight.shape), f"{name}_scale_inv": scales}, means


def in_mxfp4(name: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    """Does the same for a tensor of experts, which is stored with inputs last."""
    turned = weight.transpose(1, 2).contiguous()
    blocks = turned.view(*turned.shape[:2], -1, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
    scaled = blocks / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    means = (E2M1[codes] * scaled.sign() * torch.exp2(exponents)[..., None]).view_as(turned)
    nibbles = (codes + 8 * (scaled < 0)).to(torch.uint8)
    packed = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    stored = {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).to(torch.uint8)}
    return stored, means.transpose(1, 2).contiguous()


def quantise(folder: Path, method: Mapping[str, Any]) -> dict[str, Tensor]:
    """Quantises a folder in place; returns the weights that it then has."""
    means = load_file(folder / "model.safetensors")
    stored = dict(means)
    for name, weight in list(means.items()):
        is_fp8 = method is FP8 and "_proj.weight" in name
        if is_fp8 or (method is MXFP4 and name.endswith(("gate_up_proj", "down_proj"))):
            del stored[name]
            codes, means[name] = (in_fp8 if is_fp8 else in_mxfp4)(name, weight)
            stored |= codes
    assert len(stored) > len(means)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return means


@pytest.fixture
def opened() -> Iterator[Any]:
    found: list[Any] = []

    def build(folder: Path) -> Any:
        if found:
            found.pop().close()
        config = PolicyConfig(backend="fsdp", optimizer=OptimizerConfig(lr=1e-3))
        policy = registry.build(
            config, folder, Rendezvous(), keep_reference=True, reference_path=folder
        )
        found.append(policy)
        return policy

    yield build
    for policy in found:
        policy.close()


@pytest.mark.parametrize(
    ("model_type", "method"), [("qwen3", FP8), ("minimax_m2", FP8), ("gpt_oss", MXFP4)]
)
def test_scales_are_read_and_exports_are_whole(
    model_type: str, method: Mapping[str, Any], tmp_path: Path, opened: Any
) -> None:
    folder = tmp_path / "model"
    write_any(folder, model_type)
    whole = FsdpDescription().read_model(folder)
    shutil.copytree(folder, tmp_path / "means")
    means = quantise(folder, method)
    save_file(means, tmp_path / "means" / "model.safetensors", metadata={"format": "pt"})
    assert FsdpDescription().read_model(folder).num_parameters == whole.num_parameters
    policy = opened(folder)
    exported = {t.name: t.tensor for t in policy.export_weights()}
    assert exported.keys() == means.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, means[name]), name
    batch = sequences()
    got = policy.logprobs(batch)
    assert policy.reference_logprobs(batch) == got
    assert not policy.train_step(batch, LOSS).skipped
    policy.save_hf(tmp_path / "hf")
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    assert policy.logprobs(batch) == opened(tmp_path / "hf").logprobs(batch)
    for mine, theirs in zip(got, opened(tmp_path / "means").logprobs(batch), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_other_methods_are_refused_by_name(tmp_path: Path) -> None:
    write_any(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    for method in ("awq", "gptq", "compressed-tensors"):
        settings = config | {"quantization_config": {"quant_method": method}}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(UnsupportedModelError, match=rf"quantization_config \({method}\)"):
            FsdpDescription().read_model(tmp_path)
