from pathlib import Path

import pytest

from treadle.trainer.config import verl_keys, verl_table
from treadle.trainer.config.keys import all_leaves
from treadle.trainer.config.load import ConfigError, LoadedConfig, load_config

# The arguments of a published verl command line for multi-turn GRPO, with the one value that asks
# for what is not part of this release replaced.
_COMMAND = """
algorithm.adv_estimator=grpo
algorithm.use_kl_in_reward=False
algorithm.kl_ctrl.kl_coef=0.0
data.train_files=/data/BytedTsinghua-SIA/DAPO-Math-17k
data.val_files=/data/Maxwell-Jia/AIME_2024
data.return_raw_chat=True
data.train_batch_size=32
data.max_prompt_length=2048
data.max_response_length=5000
data.filter_overlong_prompts=True
data.truncation='error'
custom_reward_function.path=/recipe/retool.py
custom_reward_function.name=compute_score
actor_rollout_ref.model.path=font-info/qwen3-4b-sft
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.kl_loss_coef=0.0
actor_rollout_ref.actor.clip_ratio_low=0.2
actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.clip_ratio_c=10.0
actor_rollout_ref.actor.optim.lr=1e-6
algorithm.dynamic_filter.enable=False
actor_rollout_ref.actor.use_dynamic_bsz=False
actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024
actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.85
actor_rollout_ref.rollout.multi_stage_wake_up=True
actor_rollout_ref.rollout.multi_turn.enable=True
actor_rollout_ref.rollout.multi_turn.max_user_turns=16
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=16
actor_rollout_ref.rollout.multi_turn.tool_config_path=/recipe/tools.yaml
actor_rollout_ref.rollout.multi_turn.format=hermes
actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.val_kwargs.top_p=0.6
actor_rollout_ref.rollout.val_kwargs.temperature=1.0
actor_rollout_ref.rollout.val_kwargs.n=1
trainer.logger=['console','wandb']
trainer.project_name=sglang-dapo-multiturn
trainer.experiment_name=qwen2_5-3b_dapo_multiturn
trainer.n_gpus_per_node=8
trainer.log_val_generations=20
trainer.val_before_train=True
trainer.nnodes=1
trainer.save_freq=-1
trainer.test_freq=20
trainer.total_epochs=15
+trainer.rollout_trace.token2text=True
"""


def _load(*arguments: str) -> LoadedConfig:
    return load_config([], ["model.path=/m", "data.train_files=/t.jsonl", *arguments])


def test_a_command_line_of_verl_means_here_what_it_meant_there() -> None:
    loaded = load_config([], _COMMAND.split("\n")[1:-1])
    config = loaded.config
    assert config.data.prompts_per_step == 32
    assert config.data.overlong_prompts == "drop"
    assert (config.rollout.prompt_length, config.rollout.response_length) == (2048, 5000)
    assert config.rollout.samples_per_prompt == 8
    assert config.rollout.name == "sglang"
    assert config.rollout.tensor_model_parallel_size == 2
    assert config.rollout.gpu_memory_utilization == 0.85
    assert config.rollout.release_memory
    assert config.rollout.multi_stage_wake_up
    assert config.reward.name == "/recipe/retool.py:compute_score"
    assert config.algorithm.mini_batches == 4
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.clip_dual == 10.0
    assert config.algorithm.kl_coef == 0.0
    assert config.policy.recompute == "full"
    assert config.policy.parallel.data == 8
    assert config.agent.max_user_turns == config.agent.max_assistant_turns == 16
    assert config.rollout.val.top_p == 0.6
    assert config.schedule.val_every == 20
    assert config.schedule.save_every is None
    assert any("trainer.logger" in note for note in loaded.notes)


def test_every_target_of_the_table_exists() -> None:
    assert set(verl_table.RENAMED.values()) <= set(all_leaves())


def test_each_key_is_in_one_part_of_the_table() -> None:
    keys = list(verl_keys.known_keys())
    assert len(keys) == len(set(keys))


def test_no_key_of_verl_hides_one_of_ours() -> None:
    """Ours would never be reached; the few that are spelled alike mean the same."""
    assert set(verl_keys.known_keys()) & set(all_leaves()) == set()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("algorithm.adv_estimator=gae", "'gae' is not available .only grpo"),
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_coef"),
        ("algorithm.dynamic_filter.enable=True", "not part of this release"),
        ("actor_rollout_ref.rollout.name=hf", "only torch, vllm, sglang, fake.: set rollout.name"),
        ("actor_rollout_ref.rollout.expert_parallel_size=2", "set the engine's own argument in"),
        ("actor_rollout_ref.rollout.mode=sync", "only async"),
        ("actor_rollout_ref.rollout.trace.backend=weave", "tracing.backend=jsonl"),
        ("data.custom_cls.path=a.py", r"\.jsonl or \.parquet"),
        ("data.truncation=left", "only error"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=7", "do not divide the step's 16"),
        ("actor_rollout_ref.rollout.top_k=x", "is not a number"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[modl]", "'modl' is not available"),
    ],
)
def test_what_is_not_offered_is_refused_with_a_way_out(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(argument)


@pytest.mark.parametrize("none", ["0", "-1", "null"])
def test_turns_below_one_are_unlimited_as_in_verl(none: str) -> None:
    prefix = "actor_rollout_ref.rollout.multi_turn"
    agent = _load(f"{prefix}.max_assistant_turns={none}", f"{prefix}.max_user_turns={none}")
    assert agent.config.agent.max_assistant_turns is agent.config.agent.max_user_turns is None


def test_the_kl_loss_needs_its_switch() -> None:
    prefix = "actor_rollout_ref.actor"
    assert _load(f"{prefix}.kl_loss_coef=0.01").config.algorithm.kl_coef == 0.0
    on = _load(f"{prefix}.use_kl_loss=True", f"{prefix}.kl_loss_coef=0.01")
    assert on.config.algorithm.kl_coef == 0.01


def test_what_a_key_means_may_depend_on_an_earlier_layer(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text(
        "data: {train_batch_size: 64}\n"
        "actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_coef: 0.1}}\n"
    )
    prefix = "actor_rollout_ref.actor"
    arguments = [f"{prefix}.ppo_mini_batch_size=16", f"{prefix}.kl_loss_coef=0.01"]
    paths = ["model.path=/m", "data.train_files=/t.jsonl"]
    algorithm = load_config([file], [*paths, *arguments]).config.algorithm
    assert algorithm.mini_batches == 4
    assert algorithm.kl_coef == 0.01


def test_micro_batches_by_tokens_need_their_switch() -> None:
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024"
    assert _load(key).config.policy.micro_batch_tokens == 8192
    on = _load(key, "actor_rollout_ref.actor.use_dynamic_bsz=True")
    assert on.config.policy.micro_batch_tokens == 1024


_ROLLOUT = "actor_rollout_ref.rollout"


def test_settings_of_the_engine_go_to_the_engine_that_runs() -> None:
    loaded = _load(
        f"{_ROLLOUT}.name=vllm",
        f"{_ROLLOUT}.enforce_eager=True",
        f"{_ROLLOUT}.enable_prefix_caching=False",
        f"{_ROLLOUT}.max_num_batched_tokens=8192",
        f"{_ROLLOUT}.max_num_seqs=256",
        f"+{_ROLLOUT}.engine_kwargs.vllm.swap_space=4",
        f"+{_ROLLOUT}.engine_kwargs.vllm.cpu_offload_gb=null",
        f"+{_ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3",
    )
    rollout = loaded.config.rollout
    assert rollout.engine_args == {"swap_space": 4}
    assert (rollout.enforce_eager, rollout.enable_prefix_caching) == (True, False)
    assert (rollout.max_num_batched_tokens, rollout.max_in_flight) == (8192, 256)
    assert loaded.notes == (
        f"{_ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3 has no effect: "
        "rollout.name is another engine",
    )


def test_memory_is_released_when_verl_was_asked_to() -> None:
    assert not _load().config.rollout.release_memory
    assert _load(f"{_ROLLOUT}.free_cache_engine=True").config.rollout.release_memory
    assert not _load(f"{_ROLLOUT}.free_cache_engine=False").config.rollout.release_memory
    staged = _load(f"{_ROLLOUT}.multi_stage_wake_up=True").config.rollout
    assert staged.release_memory and staged.multi_stage_wake_up
    with pytest.raises(ConfigError, match="wakes up nothing"):
        _load(f"{_ROLLOUT}.multi_stage_wake_up=True", f"{_ROLLOUT}.free_cache_engine=False")


def test_a_hugging_face_model_is_saved_when_verl_was_asked_to() -> None:
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    assert _load(f"{key}=[model,optimizer,extra,hf_model]").config.schedule.save_hf == "every"
    assert _load(f"{key}=[model,optimizer,extra]").config.schedule.save_hf == "never"
    assert _load(f"{key}=hf_model").config.schedule.save_hf == "every"


def test_off_is_null() -> None:
    config = _load("actor_rollout_ref.rollout.top_k=-1", "trainer.save_freq=-1").config
    assert config.rollout.top_k is None
    assert config.schedule.save_every is None


def test_keys_of_the_agent_loop_are_taken_over(tmp_path: Path) -> None:
    rollout = "actor_rollout_ref.rollout"
    agent = load_config(
        [],
        [
            f"model.path={tmp_path}",
            "data.train_files=t.jsonl",
            f"{rollout}.multi_turn.format=gpt-oss",
            f"{rollout}.multi_turn.interaction_config_path=users.yaml",
            f"{rollout}.agent.default_agent_loop=tool_agent",
            "+data.apply_chat_template_kwargs.enable_thinking=False",
        ],
    ).config.agent
    assert (agent.parser, agent.default_loop) == ("gpt_oss", "tool_agent")
    assert agent.interaction_catalogue == Path.cwd() / "users.yaml"
    assert agent.template_kwargs == {"enable_thinking": False}
