"""What else a policy that sees is made of: adapters, a critic, its checkpoints, what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.backends.description import UnsupportedModelError
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.backends.megatron.memory import estimate_memory
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import LoraConfig, OptimizerConfig, PolicyConfig
from treadle.policy.testing.seeing import (
    SEEING,
    write_seeing_model,
)

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


def test_what_cannot_be_computed_is_refused_by_name(models: Path) -> None:
    sees = Architecture.from_folder(models / "qwen3_vl")
    with pytest.raises(UnsupportedModelError, match="the vision tower adds to the first 2"):
        sees.check_parallel(tensor=1, pipeline=4)
