"""The part of the table of verl's keys that needs no code; `verl_keys` says what the kinds mean."""

from collections.abc import Mapping
from typing import Any

__all__ = ["ABSENT", "IMPLIED", "NOTED", "REFUSED", "RENAMED"]

RENAMED = {
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.clip_dual",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.grad_clip": "policy.optimizer.grad_clip",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "policy.parallel.pipeline",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "policy.parallel.tensor",
    "actor_rollout_ref.actor.optim.lr": "policy.optimizer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "policy.optimizer.weight_decay",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.epochs",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "agent.default_loop",
    "actor_rollout_ref.rollout.data_parallel_size": "rollout.data_parallel_size",
    "actor_rollout_ref.rollout.dtype": "rollout.dtype",
    "actor_rollout_ref.rollout.enable_prefix_caching": "rollout.enable_prefix_caching",
    "actor_rollout_ref.rollout.enforce_eager": "rollout.enforce_eager",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_in_flight",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path": "agent.interaction_catalogue",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": "agent.max_parallel_calls",
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": (
        "agent.max_tool_response_chars"
    ),
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "agent.tool_catalogue",
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": (
        "agent.tool_response_truncate_side"
    ),
    "actor_rollout_ref.rollout.n": "rollout.samples_per_prompt",
    "actor_rollout_ref.rollout.prompt_length": "rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length": "rollout.response_length",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.val_kwargs.n": "rollout.val.samples_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "rollout.val.temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "rollout.val.top_p",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_by_std",
    "data.max_prompt_length": "rollout.prompt_length",
    "data.max_response_length": "rollout.response_length",
    "data.seed": "run.seed",
    "data.train_batch_size": "data.prompts_per_step",
    "trainer.default_local_dir": "run.dir",
    "trainer.experiment_name": "run.name",
    "trainer.log_val_generations": "run.val_trajectories",
    "trainer.max_actor_ckpt_to_keep": "schedule.keep_checkpoints",
    "trainer.project_name": "run.project",
    "trainer.total_epochs": "schedule.total_epochs",
    "trainer.total_training_steps": "schedule.total_steps",
    "trainer.val_before_train": "schedule.val_before_train",
}

# key -> accepted values, and why no others.
IMPLIED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        (0, 0.0),
        "give the number of steps: policy.optimizer.warmup_steps",
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": (("vanilla",), "only the clipped surrogate"),
    "actor_rollout_ref.actor.shuffle": ((False,), "mini-batches follow the batch's order"),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (
        (1,),
        "use policy.parallel.tensor with policy.parallel.sequence",
    ),
    "actor_rollout_ref.model.lora_rank": ((0,), "all weights are trained"),
    "actor_rollout_ref.model.trust_remote_code": ((False,), "a model's own code is never run"),
    "actor_rollout_ref.model.use_remove_padding": ((True,), "sequences are always packed"),
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": (
        (None,),
        "loops of this release are other classes: name each in agent.loops.NAME=module:Class",
    ),
    "actor_rollout_ref.rollout.calculate_log_probs": ((True,), "engines always report them"),
    "actor_rollout_ref.rollout.expert_parallel_size": (
        (1,),
        "set the engine's own argument in rollout.engine_args",
    ),
    "actor_rollout_ref.rollout.ignore_eos": ((False,), "trajectories end at the end-of-turn id"),
    "actor_rollout_ref.rollout.max_model_len": (
        (None,),
        "the context is rollout.prompt_length + rollout.response_length",
    ),
    "actor_rollout_ref.rollout.mode": (("async",), "trajectories always run asynchronously"),
    "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": (
        (False,),
        "one chat template serves training and inference",
    ),
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": (
        (1,),
        "set the engine's own argument in rollout.engine_args",
    ),
    "actor_rollout_ref.rollout.skip_tokenizer_init": ((True,), "servers take and give ids only"),
    "algorithm.dynamic_filter.enable": (
        (False,),
        "verl has no such key either; its algorithm.filter_groups is not part of this release",
    ),
    "algorithm.filter_groups.enable": ((False,), "group filtering is not part of this release"),
    "algorithm.gamma": ((1, 1.0), "GRPO does not discount"),
    "algorithm.lam": ((1, 1.0), "GRPO has no critic"),
    "algorithm.use_kl_in_reward": ((False,), "put the KL in the loss: algorithm.kl_coef"),
    "data.prompt_key": (("prompt",), "rename the column to `prompt`"),
    "data.return_raw_chat": ((True,), "messages always reach the agent loop"),
    "data.reward_fn_key": (("data_source",), "rename the column to `data_source`"),
    "data.truncation": (("error",), "a cut prompt is another question; see data.overlong_prompts"),
    "data.validation_shuffle": ((False,), "validation rows keep their order"),
    "trainer.critic_warmup": ((0,), "GRPO has no critic"),
    "trainer.val_only": ((False,), "`treadle eval` validates without training"),
}

_PACKED = "micro-batches are packed by tokens: policy.micro_batch_tokens"
_TEXT = "trajectories.jsonl always has the text of every span of tokens"

NOTED = {
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "the policy is Megatron's",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "the policy is Megatron's",
    "actor_rollout_ref.actor.ppo_micro_batch_size": _PACKED,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.actor.strategy": "the policy is Megatron's",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "the policy is Megatron's",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _PACKED,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.agent.num_workers": "one event loop runs all trajectories",
    "actor_rollout_ref.rollout.disable_log_stats": "the server's metrics are always there",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the server decides for its engine",
    "actor_rollout_ref.rollout.load_format": "servers load model.path",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.multi_turn.enable": "each row's agent_name chooses its loop",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": (
        "sampled ids are never tokenized again, so there is nothing to compare"
    ),
    "actor_rollout_ref.rollout.trace.token2text": _TEXT,
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "see sync.transport.bucket_bytes",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "rollout.val.temperature=0 is greedy",
    "algorithm.kl_ctrl.horizon": "read with algorithm.use_kl_in_reward only, which is off",
    "algorithm.kl_ctrl.kl_coef": "read with algorithm.use_kl_in_reward only, which is off",
    "algorithm.kl_ctrl.target_kl": "read with algorithm.use_kl_in_reward only, which is off",
    "algorithm.kl_ctrl.type": "read with algorithm.use_kl_in_reward only, which is off",
    "algorithm.kl_penalty": "read with algorithm.use_kl_in_reward only, which is off",
    "data.filter_overlong_prompts_workers": "one process reads the rows",
    "data.image_key": "rows are text; a column `images` is refused",
    "data.return_multi_modal_inputs": "rows are text",
    "data.val_batch_size": "all validation rows run at once, within rollout.max_in_flight",
    "data.video_key": "rows are text",
    "ray_kwargs.ray_init.num_cpus": "set launch=ray launch.cpus_per_process",
    "ray_init.num_cpus": "set launch=ray launch.cpus_per_process",
    "trainer.balance_batch": "sequences are always balanced over the data-parallel ranks",
    "trainer.device": "the policy takes the GPU where there is one",
    "trainer.rollout_trace.token2text": _TEXT,
    "trainer.logger": "metrics go to the console, metrics.jsonl, curves.png and report.html",
}

REFUSED = {
    "actor_rollout_ref.rollout.agent.custom_async_server.name": (
        "start a server that speaks proto/treadle/rollout/v1 instead"
    ),
    "actor_rollout_ref.rollout.agent.custom_async_server.path": (
        "start a server that speaks proto/treadle/rollout/v1 instead"
    ),
    "data.custom_cls.name": "write the rows to .jsonl or .parquet first",
    "data.custom_cls.path": "write the rows to .jsonl or .parquet first",
}

# First part of a key -> why there is nothing like it.
ABSENT = {
    "critic": "there is no critic: GRPO compares the trajectories of a row",
    "reward_model": "there is no reward model: a reward is reward.name=path.py:function",
    "reward_manager": "there are no reward managers: a reward is reward.name=path.py:function",
    "defaults": "files are not composed as by Hydra: repeat --config, later files win",
    "hydra": "there is no Hydra: give files by --config and keys as key=value",
    "ray_init": "Ray is set up by launch.kind=ray and the keys of launch",
    "ray_kwargs": "Ray is set up by launch.kind=ray and the keys of launch",
}
