"""Translates verl's keys to ours by an explicit table, so that verl users keep their commands.

Each of verl's keys is one of
  renamed   its value becomes the value of one of our keys;
  converted a function turns its value (and related values) into assignments;
  implied   accepted with the values that match our behaviour, rejected otherwise;
  noted     accepted with any value and no effect, by name or by pattern; a note gives the reason;
  unused    has no counterpart: accepted with verl's default (`verl/defaults.py`); any other value
            is an error that gives the reason or what to use instead (`verl/reasons.py`).
Any other key is unknown.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from treadle.policy.config.policy import TARGETS, OptimizerConfig, RecomputeModule
from treadle.trainer.config.keys import leaf_of
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.schema import DataConfig
from treadle.trainer.config.verl.defaults import above, has_default, verl_defaults
from treadle.trainer.config.verl.reasons import first_fit, of_other_releases, reason
from treadle.trainer.config.verl_table import IMPLIED, NOTED, NOTED_PATTERNS, RENAMED
from treadle.trainer.problems import Problems

__all__ = ["Assignment", "ConfigError", "follows_another", "known_keys", "translate"]


class ConfigError(ValueError):
    """The configuration cannot be used; the message names the key, the value and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One leaf set by one layer."""

    key: str
    value: Any
    source: str
    """A file's path, or the argument as written."""
    text: str | None
    """The value as written, for arguments."""
    base: Path
    """The directory that relative paths start from."""


Verl = Mapping[str, Any]
Converter = Callable[[Any, Verl], Mapping[str, Any]]

_ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs."

# Prefixes of tables, whose entries the user names.
_RENAMED_TABLES = {"data.apply_chat_template_kwargs": "agent.template_kwargs"}


def _off_below_one(key: str) -> Converter:
    return lambda value, _: {key: value if value and value > 0 else None}


def _unless_null(key: str) -> Converter:
    return lambda value, _: {} if value is None else {key: value}


def _one_of(key: str, names: Mapping[Any, Any], fix: str) -> Converter:
    def convert(value: Any, _: Verl) -> Mapping[str, Any]:
        if value not in names:
            accepted = ", ".join(str(name) for name in names)
            raise ConfigError(f"{value!r} is not available (only {accepted}): {fix}")
        return {key: names[value]}

    return convert


def _clip_low(value: Any, verl: Verl) -> Mapping[str, Any]:
    """A ratio is above 0, so a bound of 1 - `value` at or below 0 is none."""
    loss = verl.get("actor_rollout_ref.actor.policy_loss.loss_mode", "vanilla")
    if loss not in ("geo_mean", "dppo_tv", "dppo_kl"):  # bounds of something else
        value = min(value, 1.0)
    return {"algorithm.clip_low": value}


def _context(value: Any, verl: Verl) -> Mapping[str, Any]:
    """The longest sequence is a prompt and a response; a smaller bound would cut it."""
    names = ("prompt", "response")
    lengths = [
        verl.get(f"data.max_{name}_length")
        or verl.get(f"actor_rollout_ref.rollout.{name}_length")
        or verl.get(f"rollout.{name}_length")
        or RolloutConfig.model_fields[f"{name}_length"].default
        for name in names
    ]
    if value is not None and value < sum(lengths):
        raise ConfigError(
            f"{value} tokens are fewer than a prompt of {lengths[0]} and a response of "
            f"{lengths[1]}: set rollout.prompt_length and rollout.response_length"
        )
    return {}


def _longest_response(value: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl's reward manager is given the length again, for its penalty of long responses."""
    longest = verl.get("data.max_response_length", value)
    if value != longest:
        raise ConfigError(
            f"{value!r} is not available (only data.max_response_length={longest}): a response is "
            "too long near rollout.response_length; see reward.overlong_buffer"
        )
    return {}


def _warmup_steps(key: str) -> Converter:
    """None and numbers below 0 leave it to the ratio."""
    return lambda value, _: {key: value} if value is not None and value >= 0 else {}


def _warmup_ratio(prefix: str, key: str) -> Converter:
    def convert(value: Any, verl: Verl) -> Mapping[str, Any]:
        steps = verl.get(f"{prefix}.lr_warmup_steps")
        if not value or (steps is not None and steps > 0):  # the number wins, as in verl
            return {}
        total = verl.get("trainer.total_training_steps", verl.get("schedule.total_steps"))
        if total is None:
            raise ConfigError(
                f"{value} of an unknown number of steps: set trainer.total_training_steps too, or "
                f"{key}"
            )
        return {key: int(value * total)}

    return convert


def _lora_alpha(value: Any, verl: Verl) -> Mapping[str, Any]:
    """Without a rank there is no adapter, and verl's scripts may give an alpha of 0."""
    ranks = (verl.get(f"actor_rollout_ref.model.{key}") for key in ("lora_rank", "lora.rank"))
    return {"policy.lora.alpha": value} if value or any(ranks) else {}


def _agent_loops(value: Any, _: Verl) -> Mapping[str, Any]:
    """Verl's file lists loops as {name, _target_}; `_target_` is a class of package.module."""
    if value is None:
        return {}
    try:
        listed = yaml.safe_load(Path(value).read_bytes())
        return {
            f"agent.loops.{each['name']}": ":".join(each["_target_"].rsplit(".", 1))
            for each in listed
        }
    except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{value} is not a list of name and _target_ ({error!r}): name each loop in "
            "agent.loops.NAME=module:Class"
        ) from None


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


def _reward_kl_coef(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl has a switch beside the coefficient; here a coefficient of 0 is off."""
    used = verl.get("algorithm.use_kl_in_reward", False)
    coef = verl.get("algorithm.kl_ctrl.kl_coef", 0.001)
    return {"algorithm.reward_kl.coef": coef if used else 0.0}


def _critic_model(value: Any, verl: Verl) -> Mapping[str, Any]:
    policy = verl.get("actor_rollout_ref.model.path", verl.get("model.path"))
    if value != policy and not has_default("critic.model.path", value, verl):
        raise ConfigError(
            f"{value!r} is not available (only the policy's, {policy}): the critic begins with the "
            "policy's start weights"
        )
    return {}


def _dynamic_sampling(_: Any, verl: Verl) -> Mapping[str, Any]:
    prefix = "algorithm.filter_groups"
    if not verl.get(f"{prefix}.enable", False):
        return {"algorithm.dynamic_sampling": None}
    metric = verl.get(f"{prefix}.metric")
    names = {"acc": "accuracy", "seq_reward": "reward", "seq_final_reward": "reward"}
    fix = "set algorithm.filter_groups.metric, or algorithm.dynamic_sampling"
    return _one_of("algorithm.dynamic_sampling", names, fix)(metric, verl)


def _generation_batches(value: Any, verl: Verl) -> Mapping[str, Any]:
    if not verl.get("algorithm.filter_groups.enable", False):
        return {}
    if value < 1:
        raise ConfigError(
            f"{value!r} batches is without end in verl: set algorithm.max_generation_batches"
        )
    return {"algorithm.max_generation_batches": value}


def _overlong(prefix: str) -> Converter:
    """Verl's buffer has a switch; here a penalty of 0 is off."""

    def convert(_: Any, verl: Verl) -> Mapping[str, Any]:
        if not verl.get(f"{prefix}.enable", False):
            return {"reward.overlong_penalty": 0.0}
        return {
            "reward.overlong_penalty": verl.get(f"{prefix}.penalty_factor", 0.0),
            "reward.overlong_buffer": verl.get(f"{prefix}.len", 0),
        }

    return convert


def _reward(prefix: str) -> Converter:
    def convert(_: Any, verl: Verl) -> Mapping[str, Any]:
        path = verl.get(f"{prefix}.path")
        function = verl.get(f"{prefix}.name") or "compute_score"
        return {"reward.name": f"{path}:{function}"} if path else {}

    return convert


def _reader(_: Any, verl: Verl) -> Mapping[str, Any]:
    path, name = verl.get("data.custom_cls.path"), verl.get("data.custom_cls.name")
    if bool(path) != bool(name):
        raise ConfigError(
            f"data.custom_cls.path={path} and data.custom_cls.name={name} belong together: set "
            "both, or data.reader=path.py:Class"
        )
    return {"data.reader": f"{path}:{name}"} if path else {}


def _overlong_prompts(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl filters first, so that nothing is left to cut."""
    if verl.get("data.filter_overlong_prompts", False):
        return {"data.overlong_prompts": "drop"}
    cut = verl.get("data.truncation", "error")
    names = {side: side for side in ("error", "left", "right", "middle")}
    return _one_of("data.overlong_prompts", names, "see data.overlong_prompts")(cut, verl)


def _sequence_parallel(value: Any, verl: Verl) -> Mapping[str, Any]:
    """In verl it is on by default, and does nothing without tensor parallelism."""
    tensor = verl.get("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", 1)
    return {"policy.parallel.sequence": value if tensor > 1 else False}


def _gradient_clip(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl's engines read one of two keys; the other keeps its default, 1."""
    prefix = "actor_rollout_ref.actor"
    given = [verl.get(f"{prefix}.{key}", 1.0) for key in ("grad_clip", "optim.clip_grad")]
    chosen = {value for value in given if value != 1}
    if len(chosen) > 1:
        raise ConfigError(f"grad_clip={given[0]} and optim.clip_grad={given[1]}: set one of them")
    return {"policy.optimizer.grad_clip": chosen.pop() if chosen else 1.0}


def _betas(value: Any, _: Verl) -> Mapping[str, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{value!r} is not a list of two numbers, as [0.9,0.999]")
    return {"policy.optimizer.beta1": value[0], "policy.optimizer.beta2": value[1]}


def _min_lr(value: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl's FSDP engine gives the end of a cosine schedule as a share of the learning rate."""
    lr = verl.get("actor_rollout_ref.actor.optim.lr", OptimizerConfig.model_fields["lr"].default)
    return {"policy.optimizer.min_lr": value * lr}


def _schedule(value: Any, _: Verl) -> Mapping[str, Any]:
    if value is None:  # another of verl's keys says it
        return {}
    names = {name: name for name in ("constant", "linear", "cosine")}
    return _one_of("policy.optimizer.schedule", names, "set policy.optimizer.schedule")(value, {})


def _memory_offload(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl frees the engine's memory by default; here only if one of the two keys is set."""
    prefix = "actor_rollout_ref.rollout"
    stages = verl.get(f"{prefix}.multi_stage_wake_up", False)
    released = verl.get(f"{prefix}.free_cache_engine", True)
    if stages and not released:
        raise ConfigError(
            "multi_stage_wake_up=True with free_cache_engine=False wakes up nothing: set "
            "free_cache_engine=True, or leave out multi_stage_wake_up"
        )
    return {"rollout.release_memory": released, "rollout.multi_stage_wake_up": stages}


def _parameters_to_host(value: Any, verl: Verl) -> Mapping[str, Any]:
    """The reference of verl's Megatron engine uses the policy's value unless it has its own."""
    reference = verl.get("actor_rollout_ref.ref.megatron.param_offload", value)
    follows = isinstance(reference, str)  # it names the policy's key
    return {
        "policy.offload.parameters": value,
        "policy.offload.reference": value if follows else reference,
    }


def _function_tools(value: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl joins a catalogue and a file of functions; here a catalogue may name functions."""
    catalogue = verl.get("actor_rollout_ref.rollout.multi_turn.tool_config_path")
    if value and catalogue:
        raise ConfigError(
            f"{value} is given beside tool_config_path={catalogue}: add its functions to the "
            f"catalogue, as `- function: {value}:NAME`"
        )
    return {"agent.tool_catalogue": value} if value else {}


def _engine_args(key: str, value: Any, verl: Verl) -> Mapping[str, Any] | None:
    """`engine_kwargs.ENGINE.NAME` -> our table, where ENGINE is the one that runs, else None."""
    engine, _, name = key.removeprefix(_ENGINE_KWARGS).partition(".")
    used = verl.get("actor_rollout_ref.rollout.name", verl.get("rollout.name"))
    if engine != used:
        return None
    return {} if value is None else {f"rollout.engine_args.{name}": value}


def _micro_batch_tokens(value: Any, verl: Verl) -> Mapping[str, Any]:
    used = verl.get("actor_rollout_ref.actor.use_dynamic_bsz", False)
    return {"policy.micro_batch_tokens": value} if used else {}


def _cov_ratio(loss: str) -> Converter:
    """Verl has a ratio for each of the two losses; only that of the chosen one is read."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"

    def convert(value: Any, verl: Verl) -> Mapping[str, Any]:
        used = str(verl.get(key, verl.get("algorithm.loss"))).replace("-", "_") == loss
        return {"algorithm.cov.ratio": value} if used else {}

    return convert


_CORRECTION = "algorithm.rollout_correction"


def _bypass(_: Any, verl: Verl) -> Mapping[str, Any]:
    """In verl's bypass mode the servers' probabilities are the old ones; a loss goes with it."""
    if not verl.get(f"{_CORRECTION}.bypass_mode", False):
        return {}
    loss = verl.get(f"{_CORRECTION}.loss_type", "ppo_clip")
    losses = {"ppo_clip": "ppo", "reinforce": "policy_gradient"}
    if loss not in losses:
        raise ConfigError(f"loss_type={loss!r} is not available (only {', '.join(losses)})")
    return {"algorithm.old_logprobs": "rollout", "algorithm.loss": losses[loss]}


def _correction_weights(value: Any, verl: Verl) -> Mapping[str, Any]:
    levels = {None: "none", "token": "token", "sequence": "sample"}
    if value not in levels:
        raise ConfigError(f"{value!r} is not available (only null, token, sequence)")
    clipped = verl.get(f"{_CORRECTION}.loss_type", "ppo_clip") == "ppo_clip"
    if verl.get(f"{_CORRECTION}.bypass_mode", False) and clipped:
        value = None  # as in verl: the ratio of the loss is the weight
    return {"algorithm.correction.weights": levels[value]}


def _correction_band(value: Any, _: Verl) -> Mapping[str, Any]:
    """One number truncates; `low_high` masks."""
    low, between, high = str(value).rpartition("_")
    try:
        return {
            "algorithm.correction.low": float(low) if between else 0.0,
            "algorithm.correction.high": float(high),
            "algorithm.correction.outside": "mask" if between else "truncate",
        }
    except ValueError:
        raise ConfigError(f"{value!r} is neither a number nor low_high, as 0.5_5.0") from None


def _correction_rejection(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl bounds p_rollout / p in its k1 criteria, so that the bounds are turned over."""
    names = verl.get(f"{_CORRECTION}.rollout_rs")
    given = verl.get(f"{_CORRECTION}.rollout_rs_threshold")
    if names is None:
        return {}
    if given is None:
        raise ConfigError(f"rollout_rs={names} needs rollout_rs_threshold")
    listed = [name.strip() for name in str(names).split(",")]
    texts = [text.strip() for text in str(given).split(",")]
    if len(texts) == 1:
        texts *= len(listed)
    if len(texts) != len(listed):
        raise ConfigError(
            f"rollout_rs_threshold={given} has {len(texts)} entries for the {len(listed)} of "
            f"rollout_rs={names}"
        )
    reject: dict[str, Any] = {}
    for name, text in zip(listed, texts, strict=True):
        ours = name.replace("seq_", "sample_")
        try:
            if not name.endswith("k1"):
                reject[f"algorithm.correction.reject.{ours}"] = float(text)
                continue
            low, between, high = text.rpartition("_")
            above = float(high)
            below = float(low) if between else 1.0 / above
            reject[f"algorithm.correction.reject.{ours}"] = [1.0 / above, 1.0 / below]
        except (ValueError, ZeroDivisionError):
            raise ConfigError(
                f"rollout_rs_threshold={given}: {text!r} is not a threshold of {name}"
            ) from None
    return reject


def _save_contents(value: Any, _: Verl) -> Mapping[str, Any]:
    """A checkpoint here always holds model, optimizer and random states; hf_model is the choice."""
    known = ("model", "optimizer", "extra", "hf_model")
    contents = value if isinstance(value, list) else [value]
    if unknown := [each for each in contents if each not in known]:
        raise ConfigError(f"{unknown[0]!r} is not available (only {', '.join(known)})")
    return {"schedule.save_hf": "every" if "hf_model" in contents else "never"}


def _resume(_: Any, verl: Verl) -> Mapping[str, Any]:
    """As in verl, the path is read with resume_mode=resume_path only."""
    mode, path = verl.get("trainer.resume_mode", "auto"), verl.get("trainer.resume_from_path")
    if mode == "resume_path" and not isinstance(path, str):
        raise ConfigError(f"{mode!r} needs trainer.resume_from_path, a run or its checkpoint")
    modes = {"auto": "auto", "disable": "never", "resume_path": path}
    return _one_of("run.resume", modes, "set run.resume")(mode, verl)


def _loggers(value: Any, _: Verl) -> Mapping[str, Any]:
    """Verl takes one name or a list; what it calls file is metrics.jsonl."""
    names = value if isinstance(value, list) else [value]
    return {"run.loggers": ["jsonl" if name == "file" else name for name in names]}


_MEGATRON_OVERRIDES = "actor_rollout_ref.actor.megatron.override_transformer_config"


def _recompute(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl has one switch for its other backends, and Megatron's own settings, which are finer."""
    granularity = verl.get(f"{_MEGATRON_OVERRIDES}.recompute_granularity")
    if granularity is None:
        every = verl.get("actor_rollout_ref.model.enable_gradient_checkpointing", False)
        return {"policy.recompute": "full" if every else "none"}
    modules = verl.get(f"{_MEGATRON_OVERRIDES}.recompute_modules")
    if granularity != "selective" or modules is None:
        return {"policy.recompute": granularity}
    # Megatron has finer ones; what is computed again changes no result.
    known = [name for name in modules if name in get_args(RecomputeModule)]
    return {"policy.recompute": granularity, "policy.recompute_modules": known or modules}


def _aux_loss(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl's models have a coefficient and, unless told otherwise, no load-balancing loss."""
    kind = verl.get(f"{_MEGATRON_OVERRIDES}.moe_router_load_balancing_type", "none")
    if kind not in ("none", "aux_loss"):
        raise ConfigError(
            f"moe_router_load_balancing_type={kind!r} is not available: use aux_loss or none"
        )
    coefficient = verl.get(f"{_MEGATRON_OVERRIDES}.moe_aux_loss_coeff", 0.0)
    return {"policy.moe.aux_loss_coef": coefficient if kind == "aux_loss" else 0.0}


_ROUTING_REPLAY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
_REPLAY_MODES = tuple(
    f"actor_rollout_ref.actor.{backend}router_replay.mode" for backend in ("", "megatron.")
)


def _routing_replay(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl has a mode for the actor, and a switch for the engine that the mode R3 needs."""
    modes = {verl.get(key, "disabled") for key in _REPLAY_MODES}
    if other := modes - {"disabled", "R3"}:
        raise ConfigError(
            f"{other.pop()!r} is not available (only disabled, R3): the policy replays what the "
            "rollout engine chose, not what it chose itself"
        )
    return {"policy.moe.routing_replay": "R3" in modes or verl.get(_ROUTING_REPLAY, False)}


def _lora_targets(value: Any, _: Verl) -> Mapping[str, Any]:
    """Verl takes PEFT's word for all matrices of a layer, one name, or a list."""
    if value == "all-linear":
        return {"policy.lora.targets": list(TARGETS)}
    return {"policy.lora.targets": value if isinstance(value, list) else [value]}


_TRACE = _one_of(
    "tracing.backends",
    {None: [], **{name: [name] for name in ("weave", "mlflow", "jsonl", "otlp")}},
    "set tracing.backends",
)


def _traced_name(key: str, of_run: str) -> Converter:
    """Verl may give the traces another project or experiment than the run's."""

    def convert(value: Any, verl: Verl) -> Mapping[str, Any]:
        if value is None:
            return {}
        if value != (runs := verl.get(of_run, value)):
            raise ConfigError(
                f"{value!r} is not available, as {of_run}={runs!r}: traces are named as the run "
                f"is, by {key}"
            )
        return {key: value}

    return convert


_ENGINE = _one_of(
    "rollout.name",
    # hf samples by transformers within the run, as the torch engine does.
    {"torch": "torch", "hf": "torch", "vllm": "vllm", "sglang": "sglang", "fake": "fake"},
    "set rollout.name, and rollout.server_command if the engine has its own environment",
)

_DTYPE = _one_of(
    "policy.dtype",
    {
        **{"bfloat16": "bfloat16", "bf16": "bfloat16"},
        **{"float32": "float32", "fp32": "float32"},
    },
    "set policy.dtype",
)

# k2+ is k2, whose own gradient is the right one.
_KL_TYPES = {
    **{"kl": "k1", "k1": "k1", "kl+": "k1+", "k1+": "k1+", "abs": "abs", "abs+": "abs+"},
    **{"mse": "k2", "k2": "k2", "mse+": "k2", "k2+": "k2"},
    **{"low_var_kl": "k3", "k3": "k3", "low_var_kl+": "k3+", "k3+": "k3+"},
}

# Losses with another name in verl.
_LOSSES = {
    **{"vanilla": "ppo", "gpg": "policy_gradient", "geo_mean": "gmpo"},
    **{"gspo": "gspo", "cispo": "cispo", "clip_cov": "clip_cov", "clip-cov": "clip_cov"},
    **{"kl_cov": "kl_cov", "kl-cov": "kl_cov", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl"},
}

# Parsers with another name in verl.
_PARSERS = {"gpt-oss": "gpt_oss", "deepseek_v4": "deepseek_v32"}

_OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)

_CONVERTED: Mapping[str, Converter] = {
    "actor_rollout_ref.actor.checkpoint.save_contents": _save_contents,
    "actor_rollout_ref.actor.clip_ratio": lambda value, _: {
        "algorithm.clip_low": value,
        "algorithm.clip_high": value,
    },
    "actor_rollout_ref.actor.clip_ratio_low": _clip_low,
    "actor_rollout_ref.actor.fsdp_config.dtype": _DTYPE,
    "actor_rollout_ref.actor.grad_clip": _gradient_clip,
    "actor_rollout_ref.actor.kl_loss_coef": _kl_coef,
    "actor_rollout_ref.actor.kl_loss_type": _one_of(
        "algorithm.kl_type",
        _KL_TYPES,
        "set algorithm.kl_type",
    ),
    "actor_rollout_ref.actor.megatron.dtype": _DTYPE,
    "actor_rollout_ref.actor.megatron.param_offload": _parameters_to_host,
    "actor_rollout_ref.actor.megatron.sequence_parallel": _sequence_parallel,
    "actor_rollout_ref.actor.optim.betas": _betas,
    "actor_rollout_ref.actor.optim.clip_grad": _gradient_clip,
    "actor_rollout_ref.actor.optim.lr_decay_style": _schedule,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": _schedule,
    **{
        f"{prefix}.{name}": converter
        for prefix, key in {
            "actor_rollout_ref.actor.optim": "policy.optimizer.warmup_steps",
            "critic.optim": "critic.optimizer.warmup_steps",
        }.items()
        for name, converter in {
            "lr_warmup_steps": _warmup_steps(key),
            "lr_warmup_steps_ratio": _warmup_ratio(prefix, key),
        }.items()
    },
    "actor_rollout_ref.actor.optim.min_lr_ratio": _min_lr,
    "actor_rollout_ref.actor.optim.warmup_style": _schedule,
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": _cov_ratio("clip_cov"),
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": _cov_ratio("kl_cov"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": _one_of(
        "algorithm.loss", _LOSSES, "your own loss is algorithm.loss=path.py:name"
    ),
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _micro_batch_tokens,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _mini_batches,
    "actor_rollout_ref.actor.use_dynamic_bsz": lambda _value, _: {},
    "actor_rollout_ref.actor.use_kl_loss": _kl_coef,
    "actor_rollout_ref.model.enable_gradient_checkpointing": _recompute,
    f"{_MEGATRON_OVERRIDES}.moe_aux_loss_coeff": _aux_loss,
    f"{_MEGATRON_OVERRIDES}.moe_router_load_balancing_type": _aux_loss,
    f"{_MEGATRON_OVERRIDES}.recompute_granularity": _recompute,
    f"{_MEGATRON_OVERRIDES}.recompute_modules": _recompute,
    **{f"actor_rollout_ref.model.{name}": _lora_alpha for name in ("lora_alpha", "lora.alpha")},
    "actor_rollout_ref.model.target_modules": _lora_targets,
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": _agent_loops,
    **dict.fromkeys((*_REPLAY_MODES, _ROUTING_REPLAY), _routing_replay),
    "actor_rollout_ref.rollout.free_cache_engine": _memory_offload,
    "actor_rollout_ref.rollout.max_model_len": _context,
    "actor_rollout_ref.rollout.multi_stage_wake_up": _memory_offload,
    "actor_rollout_ref.rollout.multi_turn.format": lambda value, _: {
        "agent.parser": _PARSERS.get(value, value)
    },
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": _function_tools,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": _off_below_one(
        "agent.max_assistant_turns"
    ),
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": _off_below_one("agent.max_user_turns"),
    "actor_rollout_ref.rollout.name": _ENGINE,
    "actor_rollout_ref.rollout.top_k": _off_below_one("rollout.top_k"),
    "actor_rollout_ref.rollout.val_kwargs.top_k": _off_below_one("rollout.val.top_k"),
    "algorithm.filter_groups.enable": _dynamic_sampling,
    "algorithm.filter_groups.max_num_gen_batches": _generation_batches,
    "algorithm.filter_groups.metric": _dynamic_sampling,
    "algorithm.kl_ctrl.kl_coef": _reward_kl_coef,
    "algorithm.kl_penalty": _one_of(
        "algorithm.reward_kl.type", _KL_TYPES, "set algorithm.reward_kl.type"
    ),
    "algorithm.rollout_correction.bypass_mode": _bypass,
    "algorithm.rollout_correction.loss_type": _bypass,
    "algorithm.rollout_correction.rollout_is": _correction_weights,
    "algorithm.rollout_correction.rollout_is_threshold": _correction_band,
    "algorithm.rollout_correction.rollout_rs": _correction_rejection,
    "algorithm.rollout_correction.rollout_rs_threshold": _correction_rejection,
    "algorithm.use_kl_in_reward": _reward_kl_coef,
    "critic.model.path": _critic_model,
    **{
        f"{prefix}custom_reward_function.{name}": _reward(f"{prefix}custom_reward_function")
        for prefix in ("", "reward.")
        for name in ("path", "name")
    },
    **{
        f"{prefix}.reward_kwargs.max_resp_len": _longest_response
        for prefix in ("reward_model", "reward")
    },
    "data.custom_cls.name": _reader,
    "data.custom_cls.path": _reader,
    "data.filter_overlong_prompts": _overlong_prompts,
    "data.truncation": _overlong_prompts,
    **{
        f"{prefix}.{name}": _overlong(prefix)
        for prefix in _OVERLONG
        for name in ("enable", "len", "penalty_factor")
    },
    "data.function_tool_path": _function_tools,
    "data.seed": _unless_null("run.seed"),
    "data.val_max_samples": _off_below_one("data.max_val_rows"),
    # verl updates the policy from step critic_warmup on, the first being 1.
    "trainer.critic_warmup": lambda value, _: {"critic.warmup_steps": max(value - 1, 0)},
    "trainer.logger": _loggers,
    "trainer.max_actor_ckpt_to_keep": _unless_null("schedule.keep_checkpoints"),
    "trainer.resume_from_path": _resume,
    "trainer.resume_mode": _resume,
    **{
        f"{prefix}.{name}": converter
        for prefix in ("actor_rollout_ref.rollout.trace", "trainer.rollout_trace")
        for name, converter in {
            "backend": _TRACE,
            "experiment_name": _traced_name("run.name", "trainer.experiment_name"),
            "project_name": _traced_name("run.project", "trainer.project_name"),
        }.items()
    },
    "trainer.save_freq": _off_below_one("schedule.save_every"),
    "trainer.test_freq": _off_below_one("schedule.val_every"),
}


def known_keys() -> Iterable[str]:
    """Returns all of verl's keys that the table mentions."""
    return (*RENAMED, *_CONVERTED, *IMPLIED, *NOTED)


def follows_another(assignment: Assignment) -> bool:
    """Returns whether a value is verl's default for its key, which is that of another key."""
    value = assignment.value
    given = value in verl_defaults().get(assignment.key, ())
    return given and str(value).startswith("${") and str(value).endswith("}")


def translate(
    layer: Sequence[Assignment], values: Verl, problems: Problems
) -> tuple[list[Assignment], list[str]]:
    """Returns the layer in our keys, and notes on what was accepted without effect.

    Args:
        values: The values of all layers by key: the meaning of some of verl's keys depends on
            others, in any layer.
        problems: Gets a `ConfigError` for each of verl's keys whose value is not supported.
    """
    last = {assignment.key: assignment for assignment in layer}
    layer = [assignment for assignment in layer if last[assignment.key] is assignment]
    ours: list[Assignment] = []
    notes: list[str] = []
    for assignment in layer:
        with problems.collected():
            ours += _translated(assignment, values, notes)
    return ours, notes


def _translated(assignment: Assignment, values: Verl, notes: list[str]) -> list[Assignment]:
    """Returns one assignment in our keys; adds to `notes` what is accepted without effect."""
    key, value = assignment.key, assignment.value
    given_as = f"{key}={value!s:.80}"  # a chat template is long
    if leaf_of(key) is not None:
        return [assignment]
    if follows_another(assignment):
        return []  # the other key is translated by itself
    if key in RENAMED:
        return [replace(assignment, key=RENAMED[key])]
    if (table := _RENAMED_TABLES.get(key.rpartition(".")[0])) is not None:
        return [replace(assignment, key=f"{table}.{key.rpartition('.')[2]}")]
    if key.startswith(_ENGINE_KWARGS) and key not in verl_defaults():
        given = _engine_args(key, value, values)
        if given is None:
            notes.append(f"{given_as} has no effect: rollout.name is another engine")
            return []
        return [replace(assignment, key=k, value=v) for k, v in given.items()]
    if key in _CONVERTED:
        return _converted(assignment, values)
    if key in IMPLIED:
        accepted, why = IMPLIED[key]
        if value not in accepted:
            wanted = " or ".join(dict.fromkeys(str(v) for v in accepted))
            raise ConfigError(f"{given_as} is not available, only {wanted}: {why}")
        return []
    if (note := _without_effect(key)) is not None:
        if key not in verl_defaults() or not has_default(key, value, values):
            notes.append(f"{given_as} has no effect: {note}")
        return []
    if (recorded := above(key)) is None:
        if (other := of_other_releases(key)) is not None:
            raise ConfigError(f"{given_as} is not available: {other}")
        return [assignment]
    if key != recorded or not has_default(key, value, values):
        raise ConfigError(f"{given_as} is not available: {reason(key)}")
    return []


def _without_effect(key: str) -> str | None:
    """Returns why a key has no effect here, or None if it may have one."""
    return NOTED[key] if key in NOTED else first_fit(NOTED_PATTERNS, key)


def _converted(assignment: Assignment, values: Verl) -> list[Assignment]:
    try:
        result = _CONVERTED[assignment.key](assignment.value, values)
    except ConfigError as error:
        raise ConfigError(f"{assignment.key}: {error}") from None
    except TypeError:
        raise ConfigError(f"{assignment.key}={assignment.value!r} is not a number") from None
    return [replace(assignment, key=key, value=value, text=None) for key, value in result.items()]
