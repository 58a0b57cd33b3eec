"""The part of the table of verl's keys that needs no code; `verl_keys` explains the kinds."""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["IMPLIED", "NOTED", "NOTED_PATTERNS", "RENAMED"]

RENAMED = {
    **{
        f"{prefix}.{name}": f"tracing.{name}"
        for prefix in ("actor_rollout_ref.rollout.trace", "trainer.rollout_trace")
        for name in ("max_samples_per_step_per_worker", "token2text")
    },
    "actor_rollout_ref.actor.clip_ratio_c": "algorithm.clip_dual",
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "policy.offload.optimizer",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "policy.offload.parameters",
    "actor_rollout_ref.actor.fsdp_config.seed": "policy.seed",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "policy.parallel.context",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "policy.parallel.expert",
    "actor_rollout_ref.actor.megatron.optimizer_offload": "policy.offload.optimizer",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "policy.parallel.pipeline",
    "actor_rollout_ref.actor.megatron.seed": "policy.seed",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "policy.parallel.tensor",
    "actor_rollout_ref.actor.freeze_vision_tower": "policy.freeze_vision_tower",
    "actor_rollout_ref.actor.loss_scale_factor": "algorithm.aggregation_length",
    "actor_rollout_ref.actor.optim.eps": "policy.optimizer.eps",
    "actor_rollout_ref.actor.optim.lr": "policy.optimizer.lr",
    "actor_rollout_ref.actor.optim.lr_decay_steps": "policy.optimizer.decay_steps",
    "actor_rollout_ref.actor.optim.min_lr": "policy.optimizer.min_lr",
    "actor_rollout_ref.actor.optim.weight_decay": "policy.optimizer.weight_decay",
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": "algorithm.cov.clip_low",
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub": "algorithm.cov.clip_high",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": "algorithm.cov.kl_coef",
    "actor_rollout_ref.actor.ppo_epochs": "algorithm.epochs",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "policy.parallel.context",
    "actor_rollout_ref.model.lora_adapter_path": "policy.lora.path",
    "actor_rollout_ref.model.lora.rank": "policy.lora.rank",
    "actor_rollout_ref.model.lora_rank": "policy.lora.rank",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.nccl_timeout": "policy.collective_timeout_s",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "policy.offload.reference",
    "actor_rollout_ref.ref.megatron.param_offload": "policy.offload.reference",
    "actor_rollout_ref.rollout.agent.default_agent_loop": "agent.default_loop",
    "actor_rollout_ref.rollout.agent.num_workers": "agent.num_workers",
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
    "algorithm.adv_estimator": "algorithm.advantage",
    "algorithm.kind": "algorithm.advantage",  # of release 0.1
    "algorithm.kl_ctrl.horizon": "algorithm.reward_kl.horizon",
    "algorithm.kl_ctrl.target_kl": "algorithm.reward_kl.target",
    "algorithm.kl_ctrl.type": "algorithm.reward_kl.control",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_by_std",
    "critic.cliprange_value": "critic.clip_value",
    "critic.grad_clip": "critic.optimizer.grad_clip",
    "critic.optim.clip_grad": "critic.optimizer.grad_clip",
    "critic.optim.lr": "critic.optimizer.lr",
    "critic.optim.weight_decay": "critic.optimizer.weight_decay",
    "critic.ppo_epochs": "critic.epochs",
    "data.max_prompt_length": "rollout.prompt_length",
    "data.max_response_length": "rollout.response_length",
    "data.tool_config_path": "agent.tool_catalogue",
    "data.train_batch_size": "data.prompts_per_step",
    "trainer.default_local_dir": "run.dir",
    "trainer.experiment_name": "run.name",
    "trainer.log_val_generations": "run.val_trajectories",
    "trainer.n_gpus_per_node": "launch.gpus_per_node",
    "trainer.nnodes": "launch.nodes",
    "trainer.project_name": "run.project",
    "trainer.rollout_data_dir": "run.rollout_data_dir",
    "trainer.total_epochs": "schedule.total_epochs",
    "trainer.total_training_steps": "schedule.total_steps",
    "trainer.val_before_train": "schedule.val_before_train",
    "trainer.validation_data_dir": "run.validation_data_dir",
}

_REWARD_MANAGER = "a reward is reward.name=path.py:function"
_REWARD_MODEL = (
    "a language model that judges is reward.name=rubric.yaml, one with a scalar head "
    "reward.name=reward_model.yaml"
)

# key -> accepted values, and why no others.
IMPLIED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "actor_rollout_ref.actor.optim.optimizer": (
        ("adam", "adamw", "AdamW"),
        "set policy.optimizer.name=adamw8bit or muon, which need policy.backend=fsdp",
    ),
    "actor_rollout_ref.actor.megatron.expert_tensor_parallel_size": (
        (None, 1),
        "an expert is whole on its rank: spread experts by policy.parallel.expert",
    ),
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method": (
        (None, "uniform"),
        "policy.recompute=full runs each layer again, all of them alike",
    ),
    "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers": (
        (None, 1),
        "policy.recompute=full keeps the input of each layer",
    ),
    "actor_rollout_ref.actor.shuffle": ((False,), "mini-batches follow the batch's order"),
    "actor_rollout_ref.model.exclude_modules": (
        (None, ".*visual.*"),
        "name the matrices to adapt: policy.lora.targets",
    ),
    "actor_rollout_ref.rollout.calculate_log_probs": ((True,), "engines always report them"),
    "actor_rollout_ref.rollout.expert_parallel_size": (
        (1,),
        "set the engine's own argument in rollout.engine_args",
    ),
    "actor_rollout_ref.rollout.ignore_eos": ((False,), "trajectories end at the end-of-turn id"),
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
        "verl has no such key either: set algorithm.filter_groups.enable and .metric",
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (
        (False,),
        "weights keep their size; a common factor changes little under gradient clipping and Adam",
    ),
    "data.prompt_key": (("prompt",), "rename the column to `prompt`"),
    "data.reward_fn_key": (("data_source",), "rename the column to `data_source`"),
    "data.validation_shuffle": ((False,), "validation rows keep their order"),
    "reward.reward_manager.name": (("naive", "dapo"), _REWARD_MANAGER),
    "reward_model.enable": ((None, False), _REWARD_MODEL),
    "reward_model.reward_manager": ((None, "naive", "dapo"), _REWARD_MANAGER),
    "trainer.val_only": ((False,), "`treadle eval` validates without training"),
}

_PACKED = "micro-batches are packed by tokens: policy.micro_batch_tokens"

_KERNELS = "the policy is Megatron's, which has its own kernels"
_CRITIC = "the critic is split, packed and offloaded as the policy is: see policy"
_REFERENCE = "the reference is split, packed and computed as the policy is: see policy"
_CHUNKED = "logits are computed in chunks of policy.logits_chunk_tokens"
_FSDP = "the policy is Megatron's: see policy.parallel"
_NO_WORKERS = "one process reads the rows"
_SAME_FOLDER = "every process reads model.path"
_OWN_CODE = "a model's own code is never run: transformers' classes are"
_PROFILER = "policy.profile.first_step has the ranks profile updates; time/* has each phase"
_NO_REWARD_MODEL = "only reward_model.enable=True would read it"

NOTED = {
    "actor_rollout_ref.actor.calculate_entropy": "actor/entropy is always logged",
    "actor_rollout_ref.actor.entropy_checkpointing": _CHUNKED,
    "actor_rollout_ref.actor.entropy_from_logits_chunk_size": _CHUNKED,
    "actor_rollout_ref.actor.entropy_from_logits_with_chunking": _CHUNKED,
    "actor_rollout_ref.actor.fsdp_config.entropy_checkpointing": _CHUNKED,
    "actor_rollout_ref.actor.fsdp_config.entropy_from_logits_chunk_size": _CHUNKED,
    "actor_rollout_ref.actor.fsdp_config.entropy_from_logits_with_chunking": _CHUNKED,
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": _FSDP,
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": (
        "all ranks share the weights: see policy.parallel.replicas, with policy.backend=fsdp"
    ),
    "actor_rollout_ref.actor.fsdp_config.offload_policy": (
        "weights are on the device while the policy computes: see policy.offload"
    ),
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": _FSDP,
    "actor_rollout_ref.actor.fsdp_config.strategy": _FSDP,
    "actor_rollout_ref.actor.fsdp_config.use_orig_params": _FSDP,
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": _KERNELS,
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.min_num_params": _FSDP,
    "actor_rollout_ref.actor.megatron.entropy_from_logits_chunk_size": _CHUNKED,
    "actor_rollout_ref.actor.megatron.entropy_from_logits_with_chunking": _CHUNKED,
    "actor_rollout_ref.actor.megatron.grad_offload": (
        "gradients leave the device with the weights: see policy.offload.parameters"
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size": _PACKED,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.actor.use_prefix_grouper": (
        "prompts of a group are computed once by default: policy.share_prefixes"
    ),
    "actor_rollout_ref.actor.strategy": "the policy is Megatron's",
    "actor_rollout_ref.actor.use_fused_kernels": _KERNELS,
    "actor_rollout_ref.actor.use_torch_compile": _KERNELS,
    "actor_rollout_ref.model.enable_activation_offload": (
        "activations stay on the device: see policy.recompute"
    ),
    "actor_rollout_ref.model.fused_kernel_options.impl_backend": _KERNELS,
    "actor_rollout_ref.model.trust_remote_code": _OWN_CODE,
    "actor_rollout_ref.model.use_fused_kernels": _KERNELS,
    "actor_rollout_ref.model.use_liger": _KERNELS,
    "actor_rollout_ref.model.use_shm": _SAME_FOLDER,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _PACKED,
    "actor_rollout_ref.ref.log_prob_micro_batch_size": _PACKED,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": (
        "see sync.transport.bucket_bytes"
    ),
    "actor_rollout_ref.rollout.disable_log_stats": "the server's metrics are always there",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "the server decides for its engine",
    "actor_rollout_ref.rollout.layered_summon": "weights travel in buckets",
    "actor_rollout_ref.rollout.load_format": "servers load model.path",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.mode": "trajectories always run asynchronously",
    "actor_rollout_ref.rollout.multi_turn.enable": "each row's agent_name chooses its loop",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": (
        "sampled ids are never tokenized again, so there is nothing to compare"
    ),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "see sync.transport.bucket_bytes",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": "rollout.val.temperature=0 is greedy",
    **dict.fromkeys(
        (
            "reward_model.overlong_buffer.log",
            "reward_model.reward_kwargs.overlong_buffer_cfg.log",
            "reward.reward_kwargs.overlong_buffer_cfg.log",
        ),
        "reward/overlong_penalty is always logged",
    ),
    "data.dataloader_num_workers": _NO_WORKERS,
    "critic.forward_max_token_len_per_gpu": _PACKED,
    "critic.ppo_max_token_len_per_gpu": _PACKED,
    "critic.ppo_micro_batch_size": _PACKED,
    "critic.ppo_micro_batch_size_per_gpu": _PACKED,
    "critic.strategy": "the critic is Megatron's",
    "critic.use_dynamic_bsz": _PACKED,
    "data.filter_overlong_prompts_workers": _NO_WORKERS,
    "data.image_key": "images are in the column `images`",
    "data.return_raw_chat": "messages always reach the agent loop",
    "data.trust_remote_code": _OWN_CODE,
    "data.return_multi_modal_inputs": "ranks make pixels of the images' files themselves",
    "data.use_shm": _NO_WORKERS,
    "data.val_batch_size": "all validation rows run at once, within rollout.max_in_flight",
    "data.video_key": "rows have text and images, no videos",
    "ray_kwargs.ray_init.num_cpus": "set launch=ray launch.cpus_per_process",
    "ray_init.num_cpus": "set launch=ray launch.cpus_per_process",
    "reward.num_workers": "rewards run beside the trajectories: see reward.timeout_s",
    "reward_model.num_workers": "rewards run beside the trajectories: see reward.timeout_s",
    "trainer.balance_batch": "sequences are always balanced over the data-parallel ranks",
    "trainer.device": "the policy takes the GPU where there is one",
    "trainer.ray_wait_register_center_timeout": "see launch.start_deadline_s",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint has both: see schedule.keep_checkpoints",
    "trainer.tensorboard_dir": "TensorBoard's files are in run.dir",
    "trainer.use_legacy_worker_impl": "there is one implementation of the workers",
    "trainer.use_v1": "both of verl's trainers are schedule.kind=sync",
}

# The same by patterns of `fnmatch`, for keys of any release that change speed or memory only.
NOTED_PATTERNS: Sequence[tuple[str, str]] = (
    ("*.profiler.*", _PROFILER),
    ("global_profiler.*", _PROFILER),
    ("trainer.npu_profile.*", _PROFILER),
    ("trainer.profile_steps", _PROFILER),
    ("*.use_remove_padding", "sequences are always packed"),
    ("*.*dist_checkpointing*", "weights are read from model.path"),
    ("*.*mbridge", "weights are read from model.path"),
    ("*.virtual_pipeline_model_parallel_size", "stages are whole: see policy.parallel.pipeline"),
    ("*.override_transformer_config.*pipeline*", "see policy.parallel.pipeline"),
    *(
        (f"*.override_transformer_config.{name}", _KERNELS)
        for name in ("*_fusion", "attention_backend", "persist_layer_norm", "use_flash_attn")
    ),
    *(
        (f"*.override_transformer_config.moe_{name}", "experts are spread: policy.parallel.expert")
        for name in ("enable_deepep", "grouped_gemm", "shared_expert_overlap", "token_dispatcher*")
    ),
    ("*.override_transformer_config.moe_router_dtype", "scores of experts are float32"),
    *(
        (f"*.override_optimizer_config.{name}", "see policy.offload.optimizer")
        for name in ("*offload*", "overlap_cpu*")
    ),
    (
        "*.override_optimizer_config.use_precision_aware_optimizer",
        "weights and moments of the optimizer are float32",
    ),
    ("*.fsdp_config.model_dtype", "the optimizer's weights are float32: see policy.dtype"),
    ("*.fsdp_config.mixed_precision.*", "see policy.dtype"),
    ("*.enable_activation_offloading", "activations stay on the device: see policy.recompute"),
    *(
        (f"{prefix}.{name}", why)
        for prefix, why in (
            ("actor_rollout_ref.ref", _REFERENCE),
            ("actor_rollout_ref.ref.fsdp_config", _REFERENCE),
            ("actor_rollout_ref.ref.megatron", _REFERENCE),
            ("critic", _CRITIC),
            ("critic.fsdp", _CRITIC),
            ("critic.megatron", _CRITIC),
            ("critic.model.fsdp_config", _CRITIC),
        )
        for name in ("*_parallel_size", "*_offload", "forward_prefetch", "use_torch_compile")
    ),
    ("critic.model.enable_gradient_checkpointing", _CRITIC),
    ("critic.model.trust_remote_code", _OWN_CODE),
    *((f"critic.optim.override_optimizer_config.{name}", _CRITIC) for name in ("*cpu*", "use_p*")),
    ("critic.checkpoint.save_contents", "a checkpoint has the critic's model and optimizer"),
    *(
        (f"reward_model.{name}", _NO_REWARD_MODEL)
        for name in (
            *("model.*", "rollout.*", "megatron.*", "micro_batch_size*", "use_dynamic_bsz"),
            *("forward_max_token_len_per_gpu", "n_gpus_per_node", "nnodes", "param_offload"),
            *("enable_resource_pool", "ulysses_sequence_parallel_size", "use_reward_loop"),
        )
    ),
)
