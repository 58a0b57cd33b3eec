"""verl's keys -> ours: an explicit table, so that verl users keep their command lines.

Each of verl's keys is one of
  renamed   its value becomes the value of one of our keys;
  converted a function turns value (and its neighbours) into assignments;
  implied   accepted with the values under which our behaviour is the same, refused otherwise;
  noted     accepted with any value, because nothing here depends on it; a note says why;
  refused   an error that names what to use instead.
A key that is in none of them is unknown, as everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.trainer.config.schema import DataConfig

__all__ = ["Assignment", "ConfigError", "known_keys", "translate"]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, the value and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One leaf set by one layer."""

    key: str
    value: Any
    source: str
    """A file's path, or the argument as it was written."""
    text: str | None
    """The value as it was written, for arguments."""
    base: Path
    """What relative paths are relative to."""


Verl = Mapping[str, Any]
Converter = Callable[[Any, Verl], Mapping[str, Any]]

_RENAMED = {
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
    "actor_rollout_ref.rollout.dtype": "rollout.dtype",
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

# What stands before names of the user's.
_RENAMED_TABLES = {"data.apply_chat_template_kwargs": "agent.template_kwargs"}

# key -> accepted values, and why no others.
_IMPLIED: Mapping[str, tuple[tuple[Any, ...], str]] = {
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
    "actor_rollout_ref.rollout.tensor_model_parallel_size": (
        (1,),
        "a rollout server is one process here; use rollout.num_replicas",
    ),
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
    "trainer.val_only": ((False,), "validation alone is not part of this release"),
}

_PACKED = "micro-batches are packed by tokens: policy.micro_batch_tokens"
_MEMORY = "trainer and rollout servers do not share devices"
_GPU_ENGINE = "a setting of GPU engines"
_TEXT = "trajectories.jsonl always has the text of every span of tokens"

_NOTED = {
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
    "actor_rollout_ref.rollout.enable_chunked_prefill": _GPU_ENGINE,
    "actor_rollout_ref.rollout.enforce_eager": _GPU_ENGINE,
    "actor_rollout_ref.rollout.free_cache_engine": _MEMORY,
    "actor_rollout_ref.rollout.gpu_memory_utilization": _GPU_ENGINE,
    "actor_rollout_ref.rollout.load_format": "servers load model.path",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": _PACKED,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _PACKED,
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz": _PACKED,
    "actor_rollout_ref.rollout.max_num_batched_tokens": _GPU_ENGINE,
    "actor_rollout_ref.rollout.multi_stage_wake_up": _MEMORY,
    "actor_rollout_ref.rollout.multi_turn.enable": "each row's agent_name chooses its loop",
    "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode": (
        "sampled ids are never tokenized again, so there is nothing to compare"
    ),
    "actor_rollout_ref.rollout.trace.token2text": _TEXT,
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": "see sync.transport.chunk_bytes",
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

_REFUSED = {
    "actor_rollout_ref.rollout.agent.custom_async_server.name": (
        "start a server that speaks proto/treadle/rollout/v1 instead"
    ),
    "actor_rollout_ref.rollout.agent.custom_async_server.path": (
        "start a server that speaks proto/treadle/rollout/v1 instead"
    ),
    "data.custom_cls.name": "write the rows to .jsonl or .parquet first",
    "data.custom_cls.path": "write the rows to .jsonl or .parquet first",
}


def _off_below_one(key: str) -> Converter:
    return lambda value, _: {key: value if value and value > 0 else None}


def _one_of(key: str, names: Mapping[Any, Any], fix: str) -> Converter:
    def convert(value: Any, _: Verl) -> Mapping[str, Any]:
        if value not in names:
            accepted = ", ".join(str(name) for name in names)
            raise ConfigError(f"{value!r} is not available (only {accepted}): {fix}")
        return {key: names[value]}

    return convert


def _mini_batches(value: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl counts a mini-batch in prompts; here a step has a number of updates."""
    default = DataConfig.model_fields["prompts_per_step"].default
    prompts = verl.get("data.train_batch_size", verl.get("data.prompts_per_step", default))
    if not isinstance(value, int) or not 1 <= value <= prompts or prompts % value:
        raise ConfigError(
            f"{value!r} prompts per update do not divide the step's {prompts} "
            "(data.train_batch_size): set algorithm.mini_batches"
        )
    return {"algorithm.mini_batches": prompts // value}


def _kl_coef(_: Any, verl: Verl) -> Mapping[str, Any]:
    prefix = "actor_rollout_ref.actor"
    used = verl.get(f"{prefix}.use_kl_loss", False)
    return {"algorithm.kl_coef": verl.get(f"{prefix}.kl_loss_coef", 0.001) if used else 0.0}


def _data_parallel(_: Any, verl: Verl) -> Mapping[str, Any]:
    """All of verl's GPUs train; what tensor and pipeline leave is data parallel."""
    total = verl.get("trainer.n_gpus_per_node", 8) * verl.get("trainer.nnodes", 1)
    prefix = "actor_rollout_ref.actor.megatron"
    model = verl.get(f"{prefix}.tensor_model_parallel_size", 1) * verl.get(
        f"{prefix}.pipeline_model_parallel_size", 1
    )
    if total % model:
        raise ConfigError(f"{total} processes do not divide into groups of {model}")
    return {"policy.parallel.data": total // model}


def _reward(_: Any, verl: Verl) -> Mapping[str, Any]:
    path = verl.get("custom_reward_function.path")
    function = verl.get("custom_reward_function.name", "compute_score")
    return {"reward.name": f"{path}:{function}"} if path else {}


def _micro_batch_tokens(value: Any, verl: Verl) -> Mapping[str, Any]:
    used = verl.get("actor_rollout_ref.actor.use_dynamic_bsz", False)
    return {"policy.micro_batch_tokens": value} if used else {}


_TRACE = _one_of(
    "tracing.backend",
    {None: "none", "jsonl": "jsonl"},
    "set tracing.backend=jsonl; weave and mlflow are not part of this release",
)
_ENGINE = _one_of(
    "rollout.name",
    {"torch": "torch", "fake": "fake"},
    "set rollout.name=torch; sglang and vllm are not part of this release",
)

# Parsers that verl names otherwise.
_PARSERS = {"gpt-oss": "gpt_oss", "deepseek_v4": "deepseek_v32"}

_CONVERTED: Mapping[str, Converter] = {
    "actor_rollout_ref.actor.clip_ratio": lambda value, _: {
        "algorithm.clip_low": value,
        "algorithm.clip_high": value,
    },
    "actor_rollout_ref.actor.kl_loss_coef": _kl_coef,
    "actor_rollout_ref.actor.kl_loss_type": _one_of(
        "algorithm.kl_type",
        {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"},
        "set algorithm.kl_type",
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": lambda value, _: {
        "policy.optimizer.warmup_steps": max(value, 0)
    },
    "actor_rollout_ref.actor.optim.warmup_style": _one_of(
        "policy.optimizer.schedule",
        {"constant": "constant", "cosine": "cosine"},
        "set policy.optimizer.schedule",
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _micro_batch_tokens,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _mini_batches,
    "actor_rollout_ref.actor.use_dynamic_bsz": lambda _value, _: {},
    "actor_rollout_ref.actor.use_kl_loss": _kl_coef,
    "actor_rollout_ref.model.enable_gradient_checkpointing": lambda value, _: {
        "policy.recompute": "full" if value else "none"
    },
    "actor_rollout_ref.rollout.multi_turn.format": lambda value, _: {
        "agent.parser": _PARSERS.get(value, value)
    },
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": _off_below_one(
        "agent.max_assistant_turns"
    ),
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": _off_below_one("agent.max_user_turns"),
    "actor_rollout_ref.rollout.name": _ENGINE,
    "actor_rollout_ref.rollout.top_k": _off_below_one("rollout.top_k"),
    "actor_rollout_ref.rollout.trace.backend": _TRACE,
    "actor_rollout_ref.rollout.val_kwargs.top_k": _off_below_one("rollout.val.top_k"),
    "algorithm.adv_estimator": _one_of(
        "algorithm.kind", {"grpo": "grpo"}, "only GRPO is part of this release"
    ),
    "custom_reward_function.name": _reward,
    "custom_reward_function.path": _reward,
    "data.filter_overlong_prompts": lambda value, _: {
        "data.overlong_prompts": "drop" if value else "error"
    },
    "trainer.n_gpus_per_node": _data_parallel,
    "trainer.nnodes": _data_parallel,
    "trainer.resume_mode": _one_of(
        "run.resume", {"auto": "auto", "disable": "never"}, "set run.dir to the run to go on with"
    ),
    "trainer.rollout_trace.backend": _TRACE,
    "trainer.save_freq": _off_below_one("schedule.save_every"),
    "trainer.test_freq": _off_below_one("schedule.val_every"),
}


def known_keys() -> Iterable[str]:
    """All of verl's keys that the table mentions."""
    return (*_RENAMED, *_CONVERTED, *_IMPLIED, *_NOTED, *_REFUSED)


def translate(layer: Sequence[Assignment], below: Verl) -> tuple[list[Assignment], list[str]]:
    """The layer in our keys, and notes on what was accepted without effect.

    Args:
        layer: As it was written.
        below: What earlier layers set, by the keys that they used: the meaning of some of verl's
            keys depends on others, wherever those are set.

    Raises:
        ConfigError: one of verl's keys asks for what this release does not do.
    """
    values = {**below, **{assignment.key: assignment.value for assignment in layer}}
    ours: list[Assignment] = []
    notes: list[str] = []
    for assignment in layer:
        key, value = assignment.key, assignment.value
        if key in _RENAMED:
            ours.append(replace(assignment, key=_RENAMED[key]))
        elif (table := _RENAMED_TABLES.get(key.rpartition(".")[0])) is not None:
            ours.append(replace(assignment, key=f"{table}.{key.rpartition('.')[2]}"))
        elif key in _CONVERTED:
            ours += _converted(assignment, values)
        elif key in _IMPLIED:
            accepted, reason = _IMPLIED[key]
            if value not in accepted:
                wanted = " or ".join(dict.fromkeys(str(v) for v in accepted))
                raise ConfigError(f"{key}={value} is not available, only {wanted}: {reason}")
        elif key in _NOTED:
            notes.append(f"{key}={value} has no effect: {_NOTED[key]}")
        elif key in _REFUSED and value is not None:
            raise ConfigError(f"{key}={value} is not available: {_REFUSED[key]}")
        elif key not in _REFUSED:
            ours.append(assignment)
    return ours, notes


def _converted(assignment: Assignment, values: Verl) -> list[Assignment]:
    try:
        result = _CONVERTED[assignment.key](assignment.value, values)
    except ConfigError as error:
        raise ConfigError(f"{assignment.key}: {error}") from None
    except TypeError:
        raise ConfigError(f"{assignment.key}={assignment.value!r} is not a number") from None
    return [replace(assignment, key=key, value=value, text=None) for key, value in result.items()]
