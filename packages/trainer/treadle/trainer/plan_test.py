from pathlib import Path

import pytest

from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.critic import CriticConfig
from treadle.trainer.config.load import ConfigError
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import Config, DataConfig, ModelConfig, ScheduleConfig
from treadle.trainer.plan import make_plan


def _config(**schedule: int) -> Config:
    return Config(
        data=DataConfig(train_files=(Path("t.jsonl"),), prompts_per_step=4),
        model=ModelConfig(path=Path("m")),
        schedule=ScheduleConfig.model_validate(schedule),
    )


def test_steps_follow_from_epochs_and_full_batches() -> None:
    plan = make_plan(_config(total_epochs=3), num_train_rows=11, num_val_rows=0, cpus=2)
    assert (plan.steps_per_epoch, plan.total_steps) == (2, 6)
    assert plan.trajectories_per_step == 32


def test_total_steps_overrides_epochs() -> None:
    plan = make_plan(_config(total_steps=7), num_train_rows=11, num_val_rows=0, cpus=2)
    assert plan.total_steps == 7
    assert "a step" in plan.text()
    assert "4 prompts x 8 samples = 32 trajectories" in plan.text()


def test_trajectories_that_exceed_a_micro_batch_are_announced() -> None:
    config = _config(total_steps=1)
    text = make_plan(config, num_train_rows=11, num_val_rows=0, cpus=2).text()
    assert "long trajectories" not in text
    policy = config.policy.model_copy(
        update={"micro_batch_tokens": config.rollout.context_length - 1}
    )
    config = config.model_copy(update={"policy": policy})
    text = make_plan(config, num_train_rows=11, num_val_rows=0, cpus=2).text()
    assert "long trajectories  those of more tokens than a micro-batch train in a separate" in text


def test_the_critic_is_shown_where_there_is_one() -> None:
    config = _config(total_steps=1)
    assert "critic" not in make_plan(config, num_train_rows=11, num_val_rows=0, cpus=2).text()
    with_critic = Config(
        data=config.data,
        model=config.model,
        schedule=config.schedule,
        algorithm=AlgorithmConfig(advantage="gae", mini_batches=2),
        critic=CriticConfig(epochs=3, warmup_steps=5),
    )
    text = make_plan(with_critic, num_train_rows=11, num_val_rows=0, cpus=2).text()
    assert "6 updates a step, learning rate 1e-05; learns alone for 5 steps\n" in text


def test_the_servers_are_shown_with_their_command_and_what_is_set_of_the_engine() -> None:
    rollout = RolloutConfig(
        name="vllm",
        server_command=("/opt/vllm/bin/treadle-rollout-server",),
        tensor_model_parallel_size=2,
        engine_args={"block_size": 16},
        top_p=0.9,
        release_memory=True,
    )
    config = _config(total_steps=1).model_copy(update={"rollout": rollout})
    text = make_plan(config, num_train_rows=11, num_val_rows=0, cpus=2).text()
    assert "1 x vllm, 64 completions at a time" in text
    assert "server command   /opt/vllm/bin/treadle-rollout-server\n" in text
    assert "tensor_model_parallel_size=2, engine_args={'block_size': 16}\n" in text
    assert "released while the policy trains; all of it back, then the update\n" in text
    assert "rollout.top_p=0.9: servers report the tokens that it keeps" in text


def test_engine_settings_that_reach_no_server_are_shown_as_such() -> None:
    given = {"addresses": ["h:1"], "max_draft_tokens": 8}
    config = _config(total_steps=1).model_copy(
        update={"rollout": RolloutConfig.model_validate(given)}
    )
    text = make_plan(config, num_train_rows=11, num_val_rows=0, cpus=2).text()
    assert "max_draft_tokens=8: no server has it, as rollout.num_replicas=0 starts none" in text


def test_more_updates_than_trajectories_are_refused() -> None:
    config = _config().model_copy(update={"algorithm": AlgorithmConfig(mini_batches=33)})
    with pytest.raises(ConfigError, match=r"mini_batches=33 exceeds the 32 trajectories"):
        make_plan(config, num_train_rows=11, num_val_rows=0, cpus=2)


def test_too_few_rows_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"prompts_per_step=4 exceeds the 3 training rows"):
        make_plan(_config(), num_train_rows=3, num_val_rows=0, cpus=2)
