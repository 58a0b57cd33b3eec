"""Models that are published quantised are read with their scales, and written whole."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from treadle.policy.backend import Rendezvous
from treadle.policy.backends import registry
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.fsdp.description import FsdpDescription
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.policy.testing.any_model import write_any
from treadle.policy.testing.quantised import FP8, MXFP4, quantise
from treadle.policy.testing.state_contract import LOSS
from treadle.policy.testing.tiny import sequences


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
