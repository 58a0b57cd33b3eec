from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import SetupError
from treadle.policy.backends.megatron.architecture import Architecture
from treadle.policy.backends.registry import describe
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.testing.tiny import write_model
from treadle.trainer.preflight.model_checks import check_policy_parallel, check_training
from treadle.trainer.problems import SeveralProblems

BACKEND = describe("megatron")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Architecture]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3_moe"):
        write_model(folder / name, name, num_hidden_layers=1)
    return {name: Architecture.from_folder(Path(folder / name)) for name in ("qwen3", "qwen3_moe")}


def policy(**settings: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(settings)


def test_everything_that_does_not_fit_is_said(models: Mapping[str, Architecture]) -> None:
    sparse = models["qwen3_moe"]
    wrong = policy(parallel={"tensor": 2, "data": 3, "expert": 3}, lora={"rank": 4})
    with pytest.raises(SeveralProblems) as raised:
        check_policy_parallel(BACKEND, wrong.parallel, sparse)
    experts, sequence = map(str, raised.value.errors)
    assert experts.startswith("policy.parallel.expert=3 does not divide the model's 8 experts")
    assert "tensor=2 needs policy.parallel.sequence=true for a model with experts" in sequence
    with pytest.raises(SetupError, match=r"targets has gate_proj, up_proj, down_proj, but experts"):
        check_training(BACKEND, wrong, sparse)
    right = policy(
        parallel={"tensor": 2, "sequence": True, "data": 2, "expert": 4},
        lora={"rank": 4, "targets": ["q_proj"]},
        moe={"aux_loss_coef": 0.1},
    )
    assert not [
        *BACKEND.split_problems(sparse, right.parallel),
        *BACKEND.training_problems(sparse, right),
    ]


def test_a_dense_model_takes_no_settings_of_experts(models: Mapping[str, Architecture]) -> None:
    wrong = policy(parallel={"data": 2, "expert": 2}, moe={"aux_loss_coef": 0.1})
    check_policy_parallel(BACKEND, wrong.parallel, models["qwen3"])  # as a reference beside experts
    with pytest.raises(SeveralProblems) as raised:
        check_training(BACKEND, wrong, models["qwen3"])
    assert [str(error).partition(" needs")[0] for error in raised.value.errors] == [
        "policy.parallel.expert=2",
        "policy.moe.aux_loss_coef=0.1",
    ]
    assert not [*BACKEND.training_problems(models["qwen3"], policy(lora={"rank": 4}))]
