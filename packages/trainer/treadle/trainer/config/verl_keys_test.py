from pathlib import Path

import pytest

from treadle.policy.config.policy import TARGETS
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
    assert config.policy.parallel.data == config.launch.gpus_per_node == 8
    assert config.rollout.num_replicas == 4
    assert config.rollout.max_in_flight == 64
    assert config.policy.dtype == config.rollout.dtype == "bfloat16"
    assert config.agent.max_user_turns == config.agent.max_assistant_turns == 16
    assert config.rollout.val.top_p == 0.6
    assert config.schedule.val_every == 20
    assert config.schedule.save_every is None
    assert config.run.loggers == ("console", "wandb")


def test_a_class_for_the_data_and_what_is_cut_of_long_prompts() -> None:
    own = _load("data.custom_cls.path=/a/b.py", "data.custom_cls.name=Rows", "data.truncation=left")
    assert own.config.data.reader == "/a/b.py:Rows"
    assert own.config.data.overlong_prompts == "left"
    filtered = _load("data.truncation=left", "data.filter_overlong_prompts=True")
    assert filtered.config.data.overlong_prompts == "drop"


def test_workers_of_verl_are_loop_workers() -> None:
    given = _load("actor_rollout_ref.rollout.agent.num_workers=8")
    assert (given.config.agent.num_workers, _load().config.agent.num_workers) == (8, 0)


def test_losses_and_corrections_of_verl() -> None:
    given = _load(
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip-cov",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.1",
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.2",
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub=7",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl+",
        "actor_rollout_ref.actor.loss_agg_mode=token-sum",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
        "algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k3",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_4,0.1",
    ).config.algorithm
    assert (given.loss, given.cov.ratio, given.cov.clip_high) == ("clip_cov", 0.1, 7.0)
    assert (given.kl_type, given.loss_aggregation) == ("k3+", "token-sum")
    correction = given.correction
    assert (correction.weights, correction.outside) == ("sample", "mask")
    assert (correction.low, correction.high) == (0.5, 5.0)
    # verl bounds the server's probability over the policy's.
    assert correction.reject == {"token_k1": (0.25, 2.0), "sample_max_k3": (0.1,)}


def test_the_kl_in_the_reward() -> None:
    off = _load("algorithm.kl_ctrl.kl_coef=0.3", "algorithm.kl_penalty=kl").config.algorithm
    assert off.reward_kl.coef == 0.0
    given = _load(
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=low_var_kl",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.2",
        "algorithm.kl_ctrl.horizon=500",
    ).config.algorithm.reward_kl
    assert (given.coef, given.type, given.control) == (0.001, "k3", "adaptive")
    assert (given.target, given.horizon) == (0.2, 500.0)


def test_recomputation_of_verl() -> None:
    switch = "actor_rollout_ref.model.enable_gradient_checkpointing=True"
    override = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute"
    assert _load(switch).config.policy.recompute == "full"
    for given in ([switch], []):
        policy = _load(
            *given, f"{override}_granularity=selective", f"{override}_modules=[mlp,core_attn]"
        ).config.policy
        assert (policy.recompute, policy.recompute_modules) == ("selective", ("mlp", "core_attn"))
    full = (
        f"{override}_granularity=full",
        f"{override}_method=uniform",
        f"{override}_num_layers=1",
    )
    assert _load(*full).config.policy.recompute == "full"
    assert _load(f"{override}_granularity=null").config.policy.recompute == "none"
    for wrong in ("_method=block", "_num_layers=2", "_granularity=some"):
        with pytest.raises(ConfigError, match=r"policy\.recompute"):
            _load(f"{override}{wrong}")
    with pytest.raises(ConfigError, match=r"policy\.recompute_modules"):
        _load(f"{override}_granularity=selective", f"{override}_modules=[layernorm]")


def test_experts_of_verl() -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    override = f"{megatron}.override_transformer_config.moe"
    spread = (
        f"{megatron}.expert_model_parallel_size=4",
        f"{megatron}.expert_tensor_parallel_size=1",
        "trainer.n_gpus_per_node=4",
    )
    parallel = _load(*spread).config.policy.parallel
    assert (parallel.expert, parallel.data) == (4, 4)
    balanced = (f"{override}_aux_loss_coeff=0.001", f"{override}_router_load_balancing_type=")
    assert _load(balanced[0]).config.policy.moe.aux_loss_coef == 0.0
    assert _load(balanced[0], f"{balanced[1]}none").config.policy.moe.aux_loss_coef == 0.0
    assert _load(balanced[0], f"{balanced[1]}aux_loss").config.policy.moe.aux_loss_coef == 0.001
    with pytest.raises(ConfigError, match="use aux_loss or none"):
        _load(*balanced[:1], f"{balanced[1]}sinkhorn")
    with pytest.raises(ConfigError, match=r"an expert is whole on its rank: .*parallel\.expert"):
        _load(f"{megatron}.expert_tensor_parallel_size=2")
    with pytest.raises(ConfigError, match=r"expert=3 does not divide tensor=1 x context=1"):
        _load(*spread, "policy.parallel.expert=3")


def test_lora_of_verl() -> None:
    model = "actor_rollout_ref.model"
    rank = (f"{model}.lora_rank=8", f"{model}.lora_alpha=32")
    lora = _load(*rank, f"{model}.target_modules=all-linear").config.policy.lora
    assert (lora.rank, lora.scaling, lora.targets) == (8, 4.0, TARGETS)
    lora = _load(*rank, f"{model}.target_modules=[q_proj,v_proj]").config.policy.lora
    assert lora.targets == ("q_proj", "v_proj")
    lora = _load(*rank, f"{model}.lora_adapter_path=/adapter").config.policy.lora
    assert lora.path == Path("/adapter")
    off = _load(f"{model}.lora_rank=0", f"{model}.lora_alpha=16", f"{model}.lora.rank=0")
    assert off.config.policy.lora.rank == 0
    for wrong, said in (
        ("target_modules=[qkv]", "policy.lora.targets"),
        ("target_modules=[q_proj,q_proj]", "targets has q_proj twice"),
        ("lora_adapter_path=/adapter", "needs the rank of that adapter"),
        ("exclude_modules=.*gate.*", "name the matrices to adapt: policy.lora.targets"),
    ):
        with pytest.raises(ConfigError, match=said):
            _load(f"{model}.{wrong}")


def test_the_bypass_mode_of_verl() -> None:
    prefix = "algorithm.rollout_correction"
    clipped = _load(f"{prefix}.bypass_mode=true", f"{prefix}.rollout_is=token").config.algorithm
    assert (clipped.old_logprobs, clipped.loss, clipped.correction.weights) == (
        "rollout",
        "ppo",
        "none",
    )
    plain = _load(
        f"{prefix}.bypass_mode=true",
        f"{prefix}.loss_type=reinforce",
        f"{prefix}.rollout_is=token",
        f"{prefix}.rollout_is_threshold=3",
    ).config.algorithm
    assert (plain.old_logprobs, plain.loss) == ("rollout", "policy_gradient")
    assert (plain.correction.weights, plain.correction.high) == ("token", 3.0)
    assert plain.correction.outside == "truncate"


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
        ("algorithm.gamma=0.9", "discounts with advantage=gae or reinforce_plus_plus only"),
        ("critic.model.path=/other", "the critic begins with the policy's start weights"),
        ("critic.ppo_mini_batch_size=7", "its mini-batches are the policy's"),
        ("algorithm.dynamic_filter.enable=True", "set algorithm.filter_groups.enable"),
        ("actor_rollout_ref.rollout.name=x", "torch, hf, vllm, sglang, fake.: set rollout.name"),
        ("actor_rollout_ref.rollout.expert_parallel_size=2", "set the engine's own argument in"),
        ("actor_rollout_ref.rollout.max_model_len=99", "fewer than a prompt of"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "set trainer.total_training"),
        ("reward_model.reward_kwargs.llm_judge_kwargs.model=x", "rubric.yaml for a model that"),
        ("actor_rollout_ref.rollout.trace.backend=arize", "only None, weave, mlflow, jsonl, otlp"),
        ("actor_rollout_ref.rollout.trace.project_name=mine", "as trainer.project_name='theirs'"),
        ("data.custom_cls.path=a.py", "data.custom_cls.name=None belong together"),
        ("data.truncation=top", "only error, left, right, middle"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=7", "do not divide the step's 16"),
        ("actor_rollout_ref.rollout.top_k=x", "is not a number"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "algorithm.loss=path.py:name"),
        ("algorithm.rollout_correction.rollout_is=geometric", "only null, token, sequence"),
        ("algorithm.rollout_correction.rollout_is_threshold=a_b", "neither a number nor low_high"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "needs rollout_rs_threshold"),
        ("algorithm.rollout_correction.rollout_is_batch_normalize=true", "only False"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[modl]", "'modl' is not available"),
        ("actor_rollout_ref.actor.router_replay.mode=R2", "'R2' is not available.*disabled, R3"),
        ("critic.megatron.router_replay.mode=R3", "see policy.moe.routing_replay"),
    ],
)
def test_what_is_not_offered_is_refused_with_a_way_out(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _load("trainer.project_name=theirs", argument)


@pytest.mark.parametrize("prefix", ["actor_rollout_ref.rollout.trace", "+trainer.rollout_trace"])
def test_traces_of_verl_in_both_spellings(prefix: str) -> None:
    config = _load(
        "trainer.project_name=gsm8k_async_rl",
        f"{prefix}.backend=weave",
        f"{prefix}.token2text=True",
        f"{prefix}.max_samples_per_step_per_worker=5",
        f"{prefix}.project_name=gsm8k_async_rl",
        f"{prefix}.experiment_name=qwen",
    ).config
    assert config.tracing.backends == ("weave",)
    assert config.tracing.token2text
    assert config.tracing.max_samples_per_step_per_worker == 5
    assert (config.run.project, config.run.name) == ("gsm8k_async_rl", "qwen")
    assert _load(f"{prefix}.backend=null").config.tracing.backends == ()


def test_the_replayed_routing_of_verl() -> None:
    switch = "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
    modes = [f"actor_rollout_ref.actor.{of}router_replay.mode" for of in ("", "megatron.")]
    for mode in modes:
        assert _load(f"{mode}=R3", switch).config.policy.moe.routing_replay
        assert not _load(f"{mode}=disabled").config.policy.moe.routing_replay
        vllm = "actor_rollout_ref.rollout.name=vllm"
        assert _load(f"{mode}=R3", switch, vllm).config.policy.moe.routing_replay
        with pytest.raises(ConfigError, match=r"set rollout\.enable_prefix_caching=true"):
            _load(f"{mode}=R3", vllm, "actor_rollout_ref.rollout.enable_prefix_caching=False")


def test_the_critic_of_verl_is_ours() -> None:
    loaded = _load(
        *("algorithm.adv_estimator=gae", "algorithm.gamma=0.99", "algorithm.lam=0.95"),
        *("critic.optim.lr=2e-5", "critic.optim.lr_warmup_steps=4", "critic.ppo_epochs=2"),
        *(
            "critic.cliprange_value=0.25",
            "critic.grad_clip=0.5",
            "critic.ppo_max_token_len_per_gpu=9",
        ),
        *("trainer.critic_warmup=10", "actor_rollout_ref.model.path=/m", "critic.model.path=/m"),
    )
    algorithm, critic = loaded.config.algorithm, loaded.config.critic
    assert (algorithm.advantage, algorithm.gamma, algorithm.lam) == ("gae", 0.99, 0.95)
    optimizer = critic.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.grad_clip) == (2e-5, 4, 0.5)
    assert (critic.epochs, critic.clip_value, critic.warmup_steps) == (2, 0.25, 9)
    assert optimizer.weight_decay == 0.01
    (note,) = loaded.notes
    assert "critic.ppo_max_token_len_per_gpu=9 has no effect" in note


def test_an_estimator_of_verl_keeps_its_name_and_settings() -> None:
    algorithm = _load(
        "algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.lam=1.0"
    ).config.algorithm
    assert (algorithm.advantage, algorithm.gamma) == ("reinforce_plus_plus", 0.9)
    one = _load("algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=False")
    assert (one.config.algorithm.advantage, one.config.algorithm.norm_by_std) == (
        "grpo_passk",
        False,
    )
    assert _load("algorithm.kind=grpo").config.algorithm.advantage == "grpo"


@pytest.mark.parametrize(
    "prefix",
    [
        "reward_model.overlong_buffer",
        "+reward_model.reward_kwargs.overlong_buffer_cfg",
        "+reward.reward_kwargs.overlong_buffer_cfg",
    ],
)
def test_dapo_of_verl_is_dapo_here(prefix: str) -> None:
    config = _load(
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=5",
        "data.max_response_length=1024",
        f"{prefix}.enable=True",
        f"{prefix}.len=256",
        f"{prefix}.penalty_factor=0.5",
        f"{prefix}.log=True",
    ).config
    algorithm, reward = config.algorithm, config.reward
    assert (algorithm.dynamic_sampling, algorithm.max_generation_batches) == ("accuracy", 5)
    assert (reward.overlong_penalty, config.overlong_buffer) == (0.5, 256)
    off = _load("algorithm.filter_groups.metric=acc", f"{prefix}.len=9", f"{prefix}.enable=False")
    assert off.config.algorithm.dynamic_sampling is None
    assert off.config.reward.overlong_penalty == 0


def test_a_filter_of_verl_needs_its_metric() -> None:
    with pytest.raises(ConfigError, match=r"None is not available \(only acc, seq_reward"):
        _load("algorithm.filter_groups.enable=True")


def test_a_filter_without_end_is_refused() -> None:
    prefix = "algorithm.filter_groups"
    with pytest.raises(ConfigError, match="0 batches is without end in verl"):
        _load(f"{prefix}.enable=True", f"{prefix}.metric=acc", f"{prefix}.max_num_gen_batches=0")


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


def test_what_verl_offloads_is_in_host_memory() -> None:
    def names(*arguments: str) -> tuple[str, ...]:
        return _load(*arguments).config.policy.offload.names

    actor, ref = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
    assert names() == ()
    assert names(f"{actor}.fsdp_config.param_offload=True") == ("parameters",)
    assert names(f"{actor}.fsdp_config.optimizer_offload=True") == ("optimizer",)
    assert names(f"{ref}.fsdp_config.param_offload=True") == ("reference",)
    assert names(f"{actor}.megatron.optimizer_offload=True") == ("optimizer",)
    both = f"{actor}.megatron.param_offload=True"
    assert names(both) == ("parameters", "reference")  # as verl's reference does by default
    assert names(both, f"{ref}.megatron.param_offload=False") == ("parameters",)
    (note,) = _load("critic.megatron.param_offload=True").notes
    assert "offloaded as the policy is" in note


def test_a_hugging_face_model_is_saved_when_verl_was_asked_to() -> None:
    key = "actor_rollout_ref.actor.checkpoint.save_contents"
    assert _load(f"{key}=[model,optimizer,extra,hf_model]").config.schedule.save_hf == "every"
    assert _load(f"{key}=[model,optimizer,extra]").config.schedule.save_hf == "never"
    assert _load(f"{key}=hf_model").config.schedule.save_hf == "every"


def test_a_file_of_functions_is_a_catalogue_of_tools() -> None:
    key = "actor_rollout_ref.rollout.multi_turn"
    given = _load(f"{key}.function_tool_path=tools.py")
    assert given.config.agent.tool_catalogue == Path.cwd() / "tools.py"
    with pytest.raises(ConfigError, match="add its functions to the catalogue, as `- function: t"):
        _load(f"{key}.function_tool_path=tools.py", f"{key}.tool_config_path=tools.yaml")


def test_optimizer_and_reward_of_verl() -> None:
    actor = "actor_rollout_ref.actor"
    config = _load(
        f"{actor}.optim.betas=[0.8,0.95]",
        f"{actor}.optim.clip_grad=0.5",
        f"{actor}.grad_clip=1.0",
        f"{actor}.optim.lr=1e-5",
        f"{actor}.optim.lr_scheduler_type=cosine",
        f"{actor}.optim.warmup_style=null",
        f"{actor}.optim.lr_decay_steps=100",
        f"{actor}.optim.min_lr_ratio=0.1",
        f"{actor}.megatron.tensor_model_parallel_size=2",
        f"{actor}.megatron.sequence_parallel=True",
        f"{actor}.megatron.dtype=bfloat16",
        "reward.custom_reward_function.path=score.py",
        "data.val_max_samples=-1",
    ).config
    optimizer = config.policy.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.grad_clip) == (0.8, 0.95, 0.5)
    assert (optimizer.schedule, optimizer.decay_steps) == ("cosine", 100)
    assert optimizer.min_lr == pytest.approx(1e-6)
    assert (config.policy.parallel.tensor, config.policy.parallel.sequence) == (2, True)
    assert config.policy.dtype == "bfloat16"
    assert config.reward.name == f"{Path.cwd() / 'score.py'}:compute_score"
    assert config.data.max_val_rows is None
    assert not _load(f"{actor}.megatron.sequence_parallel=True").config.policy.parallel.sequence
    for wrong, said in (
        ([f"{actor}.optim.betas=0.9"], "0.9 is not a list of two numbers"),
        ([f"{actor}.grad_clip=2", f"{actor}.optim.clip_grad=3"], "set one of them"),
        ([f"{actor}.megatron.dtype=float16"], "set policy.dtype"),
    ):
        with pytest.raises(ConfigError, match=said):
            _load(*wrong)


def test_the_gpus_of_verl_are_divided_by_the_other_parallel_sizes() -> None:
    megatron = "actor_rollout_ref.actor.megatron"
    sizes = (
        f"{megatron}.tensor_model_parallel_size=2",
        f"{megatron}.pipeline_model_parallel_size=2",
        f"{megatron}.context_parallel_size=4",
        f"{megatron}.dynamic_context_parallel=False",
    )
    parallel = _load("trainer.n_gpus_per_node=8", "trainer.nnodes=4", *sizes).config.policy.parallel
    assert (parallel.context, parallel.data, parallel.num_ranks) == (4, 2, 32)
    with pytest.raises(ConfigError, match="8 GPUs do not divide into groups of 16"):
        _load("trainer.n_gpus_per_node=8", *sizes)
    ulysses = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    assert _load(f"{ulysses}=2").config.policy.parallel.context == 2
    with pytest.raises(ConfigError, match=r"by policy\.parallel\.context"):
        _load(f"{megatron}.dynamic_context_parallel=True")


def test_a_run_is_resumed_as_in_verl() -> None:
    path = "trainer.resume_from_path=runs/a/checkpoints/step-00000007"
    assert _load(path).config.run.resume == "auto"
    assert _load(path, "trainer.resume_mode=disable").config.run.resume == "never"
    there = Path.cwd() / "runs/a/checkpoints/step-00000007"
    assert _load(path, "trainer.resume_mode=resume_path").config.run.resume == there
    with pytest.raises(ConfigError, match=r"'resume_path' needs trainer\.resume_from_path"):
        _load("trainer.resume_mode=resume_path")


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


def test_the_warmup_of_verl_is_a_number_or_a_share_of_the_steps() -> None:
    optim = "actor_rollout_ref.actor.optim"
    share = (f"{optim}.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=250")

    def warmup(*arguments: str) -> int:
        return _load(*arguments).config.policy.optimizer.warmup_steps

    assert warmup(*share) == 25
    assert warmup(*share, f"{optim}.lr_warmup_steps=-1") == 25
    assert warmup(*share, f"{optim}.lr_warmup_steps=3") == 3
    assert warmup(f"{optim}.lr_warmup_steps=null") == 0


def test_bounds_of_verl_that_bound_nothing() -> None:
    low = "actor_rollout_ref.actor.clip_ratio_low=10"
    assert _load(low).config.algorithm.clip_low == 1
    with pytest.raises(ConfigError, match="clip_low"):  # a log-ratio has no such end
        _load(low, "actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean")
    lengths = ("data.max_prompt_length=100", "data.max_response_length=50")
    again = "+reward_model.reward_kwargs.max_resp_len"
    assert _load(*lengths, "actor_rollout_ref.rollout.max_model_len=150", f"{again}=50").notes == ()
    with pytest.raises(ConfigError, match=r"only data\.max_response_length=50"):
        _load(*lengths, f"{again}=60")


def test_a_file_of_agent_loops_names_their_classes(tmp_path: Path) -> None:
    """As the recipe for LangGraph gives it."""
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    file = tmp_path / "agent.yaml"
    file.write_text("- name: math_expression\n  _target_: recipe.math_expression.MathLoop\n")
    loops = _load(f"{key}={file}").config.agent.loops
    assert loops == {"math_expression": "recipe.math_expression:MathLoop"}
    file.write_text("name: math_expression\n")
    with pytest.raises(ConfigError, match="is not a list of name and _target_"):
        _load(f"{key}={file}")
