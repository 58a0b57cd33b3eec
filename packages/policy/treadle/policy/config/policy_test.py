from typing import Any

import pytest
from pydantic import ValidationError

from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.policy import OptimizerConfig, ParallelConfig, PolicyConfig


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (ParallelConfig, {"sequence": True}, "needs tensor above 1"),
        (
            ParallelConfig,
            {"data": 3, "replicas": 2},
            "replicas=2 does not divide context=1 x data=3",
        ),
        (ParallelConfig, {"data": 4, "replicas": 2, "expert": 4}, "a replica has all experts"),
        (OptimizerConfig, {"schedule": "cosine"}, "schedule=cosine needs decay_steps"),
        (OptimizerConfig, {"decay_steps": 5}, "not to constant"),
        (
            OptimizerConfig,
            {"schedule": "linear", "decay_steps": 5, "warmup_steps": 5},
            "decay_steps=5 must be above warmup_steps=5",
        ),
        (
            OptimizerConfig,
            {"schedule": "linear", "decay_steps": 5, "lr": 0.1, "min_lr": 0.2},
            "min_lr=0.2 is above lr=0.1",
        ),
        (PolicyConfig, {"learning_rate": 1.0}, "learning_rate"),
        (AlgorithmConfig, {"clip_dual": 1.0}, "clip_dual"),
        (AlgorithmConfig, {"loss_aggregation": "seq-mean-token-sum-norm"}, "aggregation_length"),
        (AlgorithmConfig, {"aggregation_length": 5}, "aggregation_length"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    model: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        model(**values)


def test_every_setting_is_documented() -> None:
    for model in (PolicyConfig, ParallelConfig, OptimizerConfig, AlgorithmConfig):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_derived_values() -> None:
    assert ParallelConfig(tensor=2, pipeline=3, data=4).num_ranks == 24
    assert AlgorithmConfig(epochs=2, mini_batches=3).updates_per_batch == 6
    assert AlgorithmConfig(kl_coef=0.1).needs_reference
