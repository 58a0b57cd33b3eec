"""What else a policy that sees is made of: adapters, a critic, its checkpoints, what it refuses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from treadle.agent_loop import FloatArray
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.memory import estimate_memory
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import LoraConfig, OptimizerConfig, PolicyConfig
from treadle.policy.testing import tiny
from treadle.policy.testing.seeing import (
    SEEING,
    Transformers,
    seeing_sequences,
    write_seeing_model,
)
from treadle.policy.v1 import weights_service_pb2 as weights_pb
from treadle.policy.weight_sync.delta import DeltaSender

LOSS = policy_loss(AlgorithmConfig())
LINEAR = OptimizerConfig(lr=0.05, eps=1.0, grad_clip=2.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in SEEING:
        write_seeing_model(folder / name, name)
    return folder


@pytest.fixture
def opened() -> Iterator[list[MegatronPolicy]]:
    policies: list[MegatronPolicy] = []
    yield policies
    for policy in policies:
        policy.close()


def tower_of(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {t.name: t.tensor.clone() for t in policy.export_weights() if "visual." in t.name}


@pytest.mark.parametrize("name", SEEING)
def test_adapters_are_of_the_language_model(
    models: Path, tmp_path: Path, opened: list[MegatronPolicy], name: str
) -> None:
    """What a step taught adapters is in the merged weights, and in PEFT's files under its names."""
    config = PolicyConfig(optimizer=LINEAR, lora=LoraConfig(rank=4))
    policy = MegatronPolicy(config, models / name, keep_reference=True)
    opened.append(policy)
    batch, tower = seeing_sequences(), tower_of(policy)
    before = policy.logprobs(batch)
    policy.train_step(batch, LOSS)
    after = policy.logprobs(batch)
    assert policy.reference_logprobs(batch) == before != after
    assert all(torch.equal(tensor, tower[key]) for key, tensor in tower_of(policy).items())
    policy.save_hf(tmp_path / "saved")
    merged: Any = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "saved")
    reference = Transformers(tmp_path / "saved", merged)
    for sequence, got in zip(batch, after, strict=True):
        with torch.no_grad():
            want = reference.logprobs(sequence) * torch.tensor(sequence.loss_mask[1:])
        assert got == pytest.approx([0.0, *want.tolist()], abs=1e-4)

    folder = tmp_path / "saved" / "adapter"
    modules = {f"base_model.model.{module}" for module, _ in merged.named_modules()}
    adapted = {key.rsplit(".", 2)[0] for key in load_file(folder / "adapter_model.safetensors")}
    assert len(adapted) == 4 * 7 and adapted <= modules
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["exclude_modules"] == r".*\bvisual\b.*"
    policy.close()
    opened.clear()
    again = MegatronPolicy(
        config.model_copy(update={"lora": LoraConfig(rank=4, path=folder)}), models / name
    )
    opened.append(again)
    for got, first in zip(again.logprobs(batch), after, strict=True):
        assert got == pytest.approx(first, abs=1e-5)


def test_adapters_leave_the_tower() -> None:
    with pytest.raises(ValueError, match=r"freeze_vision_tower=false with lora\.rank=4"):
        PolicyConfig(lora=LoraConfig(rank=4), freeze_vision_tower=False)


@pytest.mark.parametrize("name", SEEING)
def test_the_memory_of_a_frozen_tower_is_its_weights(
    models: Path, opened: list[MegatronPolicy], name: str
) -> None:
    opened.append(MegatronPolicy(PolicyConfig(), models / name))
    parameters = list(opened[0]._model.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    tower = opened[0].architecture.vision
    assert tower is not None and count - trained == tower.num_parameters
    estimate = estimate_memory(opened[0].architecture, PolicyConfig(), rows=100, reference=True)
    assert estimate.weights == 4 * count
    assert (estimate.gradients, estimate.optimizer) == (4 * trained, 8 * trained)
    assert estimate.reference == 4 * trained


def test_a_critic_sees(models: Path, opened: list[MegatronPolicy]) -> None:
    config = PolicyConfig(optimizer=LINEAR)
    policy = MegatronPolicy(config, models / SEEING[1])
    opened.append(policy)
    critic = policy.make_critic(CriticConfig())
    batch = [
        replace(s, values=FloatArray((0.0,) * len(s.ids)), returns=FloatArray((1.0,) * len(s.ids)))
        for s in seeing_sequences()
    ]
    critic.train_step(batch)
    values = critic.values(batch)
    # The first and the fourth have the same prompt but for the pixels of an image.
    place = batch[0].loss_mask.index(True)
    assert batch[0].ids[:place] == batch[3].ids[:place]
    assert values[0][place] != values[3][place]


@pytest.mark.parametrize("frozen", [True, False])
def test_training_goes_on_exactly(
    models: Path, tmp_path: Path, opened: list[MegatronPolicy], frozen: bool
) -> None:
    config = PolicyConfig(optimizer=LINEAR, freeze_vision_tower=frozen)
    batch = seeing_sequences()
    policy = MegatronPolicy(config, models / SEEING[0])
    tower = tower_of(policy)
    sender = DeltaSender()
    begin = weights_pb.ComputeDeltaRequest(version=0, base_version=None, element_type="bfloat16")
    sender.compute(policy, begin, rank=0)
    policy.train_step(batch, LOSS)
    changes = weights_pb.ComputeDeltaRequest(version=1, base_version=0, element_type="bfloat16")
    sizes = sender.compute(policy, changes, rank=0).encoded_bytes
    # A delta sends nothing of a tower that stays.
    assert (sum(sizes[name] for name in tower) == 0) == frozen
    assert sum(sizes.values()) > 0
    assert all(torch.equal(t, tower[key]) for key, t in tower_of(policy).items()) == frozen
    policy.save(tmp_path / "step_1")
    want = policy.train_step(batch, LOSS)
    policy.close()
    again = MegatronPolicy(config, models / SEEING[0])
    opened.append(again)
    again.load(tmp_path / "step_1")
    assert again.train_step(batch, LOSS).loss == want.loss


def test_what_cannot_be_computed_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    sees = Architecture.from_folder(models / "qwen3_vl")
    with pytest.raises(UnsupportedModelError, match="the vision tower adds to the first 2"):
        sees.check_parallel(tensor=1, pipeline=4)
    tiny.write_model(tmp_path / "text")
    text = Architecture.from_folder(tmp_path / "text")
    with pytest.raises(UnsupportedModelError, match="qwen2 sees no images, and the policy"):
        sees.check_reference(text)
    text.check_reference(sees)


def test_a_text_model_refuses_images(tmp_path: Path, opened: list[MegatronPolicy]) -> None:
    tiny.write_model(tmp_path / "text")
    opened.append(MegatronPolicy(PolicyConfig(), tmp_path / "text"))
    with pytest.raises(ValueError, match="sequences have images, and the model has no vision"):
        opened[0].logprobs(seeing_sequences())
