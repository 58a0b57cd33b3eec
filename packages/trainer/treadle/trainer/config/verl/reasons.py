"""Why Treadle has nothing like some of verl's keys, and what to use instead.

A refusal is `KEY=VALUE is not available: REASON`. Patterns are those of `fnmatch`; the first that
fits a key counts, so that what is special stands above what is general.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

__all__ = ["REASONS", "first_fit", "of_other_releases", "reason"]

_JUDGE = "a reward is reward.name=path.py:function, or a rubric.yaml for a model that judges"
_ENGINE_ARGS = "set the engine's own argument in rollout.engine_args"
_MEGATRON = "the policy is Megatron's: see policy.parallel, policy.recompute and policy.dtype"

REASONS: Sequence[tuple[str, str]] = (
    ("*._target_", "classes of verl are not loaded: leave the key out"),
    ("*.qat.*", "there is no quantization-aware training: train in policy.dtype"),
    ("*.rollout.qat", "there is no quantization-aware training: train in policy.dtype"),
    (
        "*.router_replay.*",
        "only the policy replays, and what its rollout engine chose: see policy.moe.routing_replay",
    ),
    ("*.moe_load_balance_metrics_interval", "moe/* has the experts' load of every step"),
    ("*.turbo_config.*", _MEGATRON),
    ("*.veomni.*", _MEGATRON),
    ("*.torchtitan.*", _MEGATRON),
    ("*.optim.muon_*", "policy.optimizer.name=muon takes policy.optimizer.momentum only"),
    ("*.mtp.*", "no head for multi-token prediction is trained"),
    ("*.rollout.mtp", f"speculation is the engine's: {_ENGINE_ARGS}"),
    # Actor.
    ("actor_rollout_ref.hybrid_engine", "servers are separate processes"),
    ("actor_rollout_ref.actor.rollout_n", "set rollout.samples_per_prompt"),
    ("actor_rollout_ref.actor.tau_*", "there is no loss sapo: see algorithm.loss"),
    ("actor_rollout_ref.actor.policy_loss.dro_beta", "there is no loss dro: see algorithm.loss"),
    ("actor_rollout_ref.actor.calculate_sum_pi_squared", "no estimator here reads it"),
    ("actor_rollout_ref.actor.data_loader_seed", "mini-batches follow the batch's order"),
    (
        "actor_rollout_ref.actor.checkpoint.*",
        "a checkpoint has model, optimizer and random states, is written before the next step, "
        "and is read whole",
    ),
    ("actor_rollout_ref.actor.optim.*", "policy.optimizer.name chooses it: see policy.optimizer"),
    ("actor_rollout_ref.actor.pad_to_length*", "sequences are packed, never padded"),
    ("actor_rollout_ref.*.pad_to_length*", "sequences are packed, never padded"),
    ("actor_rollout_ref.*.pad_bshd_to_minibatch_max", "sequences are packed, never padded"),
    ("actor_rollout_ref.actor.fsdp_config.*", _MEGATRON),
    (
        "actor_rollout_ref.actor.megatron.dist*",
        "checkpoints are Megatron's torch_dist in run.dir, and can be read with other "
        "parallel sizes",
    ),
    (
        "actor_rollout_ref.actor.megatron.*context_parallel*",
        "every micro-batch is split by policy.parallel.context",
    ),
    (
        "actor_rollout_ref.actor.megatron.use_distributed_optimizer",
        "the optimizer's state is sharded where policy.parallel.data is above 1",
    ),
    ("actor_rollout_ref.actor.megatron.*", _MEGATRON),
    ("actor_rollout_ref.actor.*", _MEGATRON),
    # Reference.
    ("actor_rollout_ref.ref.*", "the reference is computed as the policy is: see policy"),
    # Rollout.
    ("actor_rollout_ref.rollout.nnodes", "servers are placed by launch and rollout.num_replicas"),
    (
        "actor_rollout_ref.rollout.n_gpus_per_node",
        "servers are placed by launch and rollout.num_replicas",
    ),
    ("actor_rollout_ref.rollout.seed", "every completion has its own seed, by run.seed"),
    ("actor_rollout_ref.rollout.full_determinism", _ENGINE_ARGS),
    ("actor_rollout_ref.rollout.cudagraph_capture_sizes", _ENGINE_ARGS),
    ("actor_rollout_ref.rollout.scheduling_policy", _ENGINE_ARGS),
    ("actor_rollout_ref.rollout.limit_images", _ENGINE_ARGS),
    ("actor_rollout_ref.rollout.quantization*", "servers compute in rollout.dtype"),
    (
        "actor_rollout_ref.rollout.logprobs_mode",
        "servers report the log-probabilities that they sampled from",
    ),
    (
        "actor_rollout_ref.rollout.do_sample",
        "training samples; rollout.val.temperature=0 is greedy validation",
    ),
    (
        "actor_rollout_ref.rollout.over_sample_rate",
        "set schedule.kind=stream and schedule.surplus: what has not ended is carried over",
    ),
    (
        "actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts",
        "set rollout.samples_per_prompt",
    ),
    (
        "actor_rollout_ref.rollout.agent.custom_async_server.*",
        "start a server that speaks proto/treadle/rollout/v1 instead",
    ),
    ("actor_rollout_ref.rollout.agent.*", "one event loop runs all trajectories: see agent"),
    (
        "actor_rollout_ref.rollout.router_config_path",
        "the driver chooses a server for each session",
    ),
    (
        "actor_rollout_ref.rollout.checkpoint_engine.*",
        "set sync.transport: inline, file, shared_memory or collective",
    ),
    ("actor_rollout_ref.rollout.trace.*", "see tracing"),
    (
        "actor_rollout_ref.rollout.prometheus.*",
        "every server has its metrics at its own address: see docs/operations.md",
    ),
    ("actor_rollout_ref.rollout.disaggregation.*", "a server computes prompts and completions"),
    ("actor_rollout_ref.rollout.*", _ENGINE_ARGS),
    # Model.
    ("actor_rollout_ref.model.tokenizer_path", "the tokenizer is that of model.path"),
    ("actor_rollout_ref.model.hf_config_path", "config.json is that of model.path"),
    (
        "actor_rollout_ref.model.custom_chat_template",
        "the chat template is that of model.path: write it into a copy of the model's folder",
    ),
    ("actor_rollout_ref.model.external_lib", "a model's own code is never run"),
    ("actor_rollout_ref.model.override_config*", "edit config.json in a copy of model.path"),
    ("actor_rollout_ref.model.*lora*", "see policy.lora: adapters of Hugging Face's matrices"),
    ("actor_rollout_ref.model.*_modules", "name the matrices in policy.lora.targets"),
    ("actor_rollout_ref.model.tiled_mlp.*", "set policy.micro_batch_tokens"),
    ("actor_rollout_ref.model.*", _MEGATRON),
    # Data.
    ("data.tokenizer", "the tokenizer is that of model.path"),
    ("data.train_max_samples", "cut the file: all rows of data.train_files are used"),
    (
        "data.gen_batch_size",
        "algorithm.dynamic_sampling samples batches of data.prompts_per_step rows",
    ),
    ("data.*multi_modal*", "ranks make pixels of the images' files: see docs/models.md"),
    ("data.*image*", "images are in the column `images`, and the model's processor sizes them"),
    ("data.audio_key", "the policy hears nothing"),
    ("data.mm_processor_kwargs", "the image processor is that of model.path"),
    ("data.return_*", "messages and rendered ids always reach the agent loop"),
    ("data.*", "see data"),
    # Critic.
    ("critic.enable", "there is a critic with algorithm.advantage=gae, and only with it"),
    ("critic.optim.*", "critic.optimizer.name chooses it: see critic.optimizer"),
    ("critic.loss_*", "it is reduced as the policy's loss: set algorithm.loss_aggregation"),
    ("critic.ppo_mini_batch_size", "its mini-batches are the policy's: algorithm.mini_batches"),
    ("critic.model.*", "the critic begins with the policy's start weights, and trains all of them"),
    ("critic.checkpoint.*", "a checkpoint has model and optimizer, and is read whole"),
    ("critic.*", f"the critic is like the policy: {_MEGATRON}"),
    # Rewards.
    (
        "*reward_manager*",
        "there are no reward managers: a reward is reward.name=path.py:function",
    ),
    ("*reward_loop*", "there are no reward managers: a reward is reward.name=path.py:function"),
    (
        "*sandbox_fusion.*",
        "the address of a sandbox is in the catalogue of tools (agent.tool_catalogue)",
    ),
    (
        "reward_model.*",
        f"there is no reward model: {_JUDGE}",
    ),
    (
        "reward.reward_model.*",
        f"there is no reward model: {_JUDGE}",
    ),
    ("reward.*", "a reward is reward.name=path.py:function"),
    # Algorithm.
    (
        "algorithm.filter_groups.max_inflight_gen_batches",
        "a further batch is sampled when the one before it is whole",
    ),
    ("algorithm.*pf_ppo*", "samples are not weighted by their reward"),
    (
        "distillation.*",
        "distillation is algorithm.loss=distillation, with the teacher in algorithm.reference_path "
        "or on the servers of algorithm.reference_addresses",
    ),
    # Trainer.
    (
        "trainer.rollout_data_dir",
        "trajectories.jsonl in run.dir has run.trajectories_per_step of each step",
    ),
    (
        "trainer.validation_data_dir",
        "trajectories.jsonl in run.dir has run.val_trajectories of each validation",
    ),
    ("trainer.default_hdfs_dir", "checkpoints are in run.dir"),
    ("trainer.del_local_ckpt_after_load", "set schedule.keep_checkpoints"),
    ("trainer.esi_redundant_time", "set schedule.save_every"),
    ("trainer.checkpoint_callback_class", "train(on_step=...) calls your function after each step"),
    (
        "trainer.v1.trainer_mode",
        "set schedule.kind: stream for colocate_async, async for separate_async",
    ),
    (
        "trainer.v1.sampler.max_off_policy_threshold",
        "set schedule.max_staleness, with schedule.kind=async",
    ),
    (
        "trainer.v1.sampler.max_off_policy_strategy",
        "nothing is dropped: schedule.kind=async begins a group only if a step can train on it "
        "within schedule.max_staleness",
    ),
    (
        "trainer.v1.sampler.sync_refill_failed_groups",
        "schedule.kind=stream and async give the place of a failed group to the next row",
    ),
    ("trainer.v1.separate_async.parameter_sync_step", "weights are sent after every step"),
    (
        "trainer.v1.sampler.*",
        "trajectories of a step are trained on in that step; see algorithm.dynamic_sampling",
    ),
    ("trainer.v1.*", "see schedule.kind"),
    ("trainer.*", "see schedule and run"),
    ("skip.*", "every step samples its own trajectories"),
    ("transfer_queue.*", "the driver hands the tokens to the policy"),
    # What is no key of verl's tree.
    ("defaults*", "a file may list others there, an argument may not: repeat --config"),
    ("hydra*", "there is no Hydra: give files by --config and keys as key=value"),
    ("ray_init*", "Ray is set up by launch.kind=ray and the keys of launch"),
    ("ray_kwargs*", "Ray is set up by launch.kind=ray and the keys of launch"),
)

_OTHER_RELEASES: Sequence[tuple[str, str]] = (
    (
        "reward_model.sandbox_fusion.*",
        "a sandbox is in the catalogue of tools: agent.tool_catalogue",
    ),
    ("reward_model.reward_kwargs.*", _JUDGE),
    ("data.sampler.*", "rows are shuffled by data.shuffle and run.seed"),
    ("algorithm.rollout_correction.*", "see algorithm.correction"),
    ("trainer.rl_logging_board_dir", "loggers are in run.loggers"),
    ("actor_rollout_ref.model.torch_dtype", "see policy.dtype"),
    ("*.override_transformer_config.fp8*", "the policy computes in policy.dtype"),
)


def first_fit(rows: Sequence[tuple[str, str]], key: str) -> str | None:
    """Returns the text of the first pattern that fits a key; None if none does."""
    return next((text for pattern, text in rows if fnmatchcase(key, pattern)), None)


def of_other_releases(key: str) -> str | None:
    """Returns why a key that only other releases of verl have is not available."""
    return first_fit(_OTHER_RELEASES, key)


def reason(key: str) -> str | None:
    """Returns why a key is not available; None where nothing is known about it."""
    return first_fit(REASONS, key)
