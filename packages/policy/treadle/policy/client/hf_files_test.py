import json
from pathlib import Path
from typing import Any

import pytest

from treadle.policy.client.hf_files import quantisation


def _write(folder: Path, config: dict[str, Any], types: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: {"dtype": kind, "shape": [0], "data_offsets": [0, 0]} for name, kind in types.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | tensors).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.parametrize(
    ("config", "name", "kind", "found"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "a", "F32", "quantization_config (fp8)"),
        ({"text_config": {"quantization_config": {}}}, "a.weight", "F32", None),
        ({"text_config": {"quantization_config": {"x": 1}}}, "a", "F32", "quantization_config"),
        ({"compression_config": {"format": "int"}}, "a", "F32", "compression_config"),
        ({}, "a.weight", "F8_E4M3", "model.safetensors stores a.weight as F8_E4M3"),
        ({}, "a.qweight", "I32", "stores a.qweight as I32"),
        ({}, "a.position_ids", "I64", None),
        ({}, "a.weight", "BF16", None),
    ],
)
def test_quantised_weights_are_recognised(
    tmp_path: Path, config: dict[str, Any], name: str, kind: str, found: str | None
) -> None:
    _write(tmp_path, config, {name: kind})
    assert (
        (quantisation(tmp_path) is None)
        if found is None
        else found in (quantisation(tmp_path) or "")
    )


def test_scales_of_modelopt_count_and_a_damaged_file_is_left_to_its_reader(tmp_path: Path) -> None:
    _write(tmp_path, {}, {})
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert quantisation(tmp_path) is None
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "hf_quant_config.json" in (quantisation(tmp_path) or "")
