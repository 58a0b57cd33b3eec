"""Translates verl's keys to ours by an explicit table, so that verl users keep their commands.

Each of verl's keys is one of
  renamed   its value becomes the value of one of our keys;
  converted a function turns its value (and related values) into assignments;
  implied   accepted with the values that match our behaviour, rejected otherwise;
  noted     accepted with any value and no effect; a note says why;
  refused   an error that names what to use instead.
Any other key is unknown.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.trainer.config.schema import DataConfig
from treadle.trainer.config.verl_table import IMPLIED, NOTED, REFUSED, RENAMED
from treadle.trainer.problems import Problems

__all__ = ["Assignment", "ConfigError", "known_keys", "translate"]


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
    """Returns the data-parallel size: all of verl's GPUs, divided by tensor x pipeline."""
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


def _memory_offload(_: Any, verl: Verl) -> Mapping[str, Any]:
    """Verl frees the engine's memory by default; here that is asked for, by either key."""
    prefix = "actor_rollout_ref.rollout"
    stages = verl.get(f"{prefix}.multi_stage_wake_up", False)
    released = verl.get(f"{prefix}.free_cache_engine", True)
    if stages and not released:
        raise ConfigError("multi_stage_wake_up=True with free_cache_engine=False wakes up nothing")
    return {"rollout.release_memory": released, "rollout.multi_stage_wake_up": stages}


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


def _save_contents(value: Any, _: Verl) -> Mapping[str, Any]:
    """A checkpoint here always holds model, optimizer and random states; hf_model is the choice."""
    known = ("model", "optimizer", "extra", "hf_model")
    contents = value if isinstance(value, list) else [value]
    if unknown := [each for each in contents if each not in known]:
        raise ConfigError(f"{unknown[0]!r} is not available (only {', '.join(known)})")
    return {"schedule.save_hf": "every" if "hf_model" in contents else "never"}


_TRACE = _one_of(
    "tracing.backend",
    {None: "none", "jsonl": "jsonl"},
    "set tracing.backend=jsonl; weave and mlflow are not part of this release",
)
_ENGINE = _one_of(
    "rollout.name",
    {"torch": "torch", "vllm": "vllm", "sglang": "sglang", "fake": "fake"},
    "set rollout.name, and rollout.server_command if the engine has its own environment",
)

# Parsers with another name in verl.
_PARSERS = {"gpt-oss": "gpt_oss", "deepseek_v4": "deepseek_v32"}

_CONVERTED: Mapping[str, Converter] = {
    "actor_rollout_ref.actor.checkpoint.save_contents": _save_contents,
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
    "actor_rollout_ref.rollout.free_cache_engine": _memory_offload,
    "actor_rollout_ref.rollout.multi_stage_wake_up": _memory_offload,
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
        "run.resume", {"auto": "auto", "disable": "never"}, "set run.dir to the run to continue"
    ),
    "trainer.rollout_trace.backend": _TRACE,
    "trainer.save_freq": _off_below_one("schedule.save_every"),
    "trainer.test_freq": _off_below_one("schedule.val_every"),
}


def known_keys() -> Iterable[str]:
    """Returns all of verl's keys that the table mentions."""
    return (*RENAMED, *_CONVERTED, *IMPLIED, *NOTED, *REFUSED)


def translate(
    layer: Sequence[Assignment], below: Verl, problems: Problems
) -> tuple[list[Assignment], list[str]]:
    """Returns the layer in our keys, and notes on what was accepted without effect.

    Args:
        layer: The assignments as written.
        below: The values of earlier layers by key: the meaning of some of verl's keys depends on
            others, in any layer.
        problems: Gets a `ConfigError` for each of verl's keys that asks for an unsupported
            behaviour.
    """
    values = {**below, **{assignment.key: assignment.value for assignment in layer}}
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
    if key in RENAMED:
        return [replace(assignment, key=RENAMED[key])]
    if (table := _RENAMED_TABLES.get(key.rpartition(".")[0])) is not None:
        return [replace(assignment, key=f"{table}.{key.rpartition('.')[2]}")]
    if key.startswith(_ENGINE_KWARGS):
        given = _engine_args(key, value, values)
        if given is None:
            notes.append(f"{key}={value} has no effect: rollout.name is another engine")
            return []
        return [replace(assignment, key=k, value=v) for k, v in given.items()]
    if key in _CONVERTED:
        return _converted(assignment, values)
    if key in IMPLIED:
        accepted, reason = IMPLIED[key]
        if value not in accepted:
            wanted = " or ".join(dict.fromkeys(str(v) for v in accepted))
            raise ConfigError(f"{key}={value} is not available, only {wanted}: {reason}")
        return []
    if key in NOTED:
        # False moves nothing to the host, as asked.
        if value is not False or not key.endswith("_offload"):
            notes.append(f"{key}={value} has no effect: {NOTED[key]}")
        return []
    if key in REFUSED:
        if value is not None:
            raise ConfigError(f"{key}={value} is not available: {REFUSED[key]}")
        return []
    return [assignment]


def _converted(assignment: Assignment, values: Verl) -> list[Assignment]:
    try:
        result = _CONVERTED[assignment.key](assignment.value, values)
    except ConfigError as error:
        raise ConfigError(f"{assignment.key}: {error}") from None
    except TypeError:
        raise ConfigError(f"{assignment.key}={assignment.value!r} is not a number") from None
    return [replace(assignment, key=key, value=value, text=None) for key, value in result.items()]
