"""Folders of models that are stored quantised, and what their weights mean."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK: Final = 16
FP8: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
MXFP4: Final = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _in_fp8(name: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
    """Returns what is stored of a matrix, and what it means."""
    rows, columns = (n // BLOCK for n in weight.shape)
    blocks = weight.view(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    means = (codes.float() * scales[:, None, :, None]).reshape(weight.shape)
    return {name: codes.reshape(weight.shape), f"{name}_scale_inv": scales}, means


def _in_mxfp4(name: str, weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
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
            codes, means[name] = (_in_fp8 if is_fp8 else _in_mxfp4)(name, weight)
            stored |= codes
    assert len(stored) > len(means)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return means
