"""The run's configuration: one tree, in which each leaf has one default, one doc and its bounds.

The attribute docstrings are the documentation: `--help` and docs/config.md are generated from them.
A check of several fields is in the smallest section that has them all, and quotes their values.
`policy` and `algorithm` are declared in modules next to this one.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from treadle.agent_loop.parsers import PARSER_ALIASES, PARSER_NAMES
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.policy.config.base import Count, Seconds, Section
from treadle.policy.config.critic import CriticConfig
from treadle.policy.config.policy import PolicyConfig
from treadle.policy.config.weight_sync import WeightSyncConfig
from treadle.trainer.config.launch import LaunchConfig, LocalLaunchConfig, RayLaunchConfig
from treadle.trainer.config.logger_names import ALWAYS, NAMED, same_short_name, unknown_logger
from treadle.trainer.config.rollout import RolloutConfig
from treadle.trainer.config.topology import make_topology

__all__ = [
    "AgentConfig",
    "AnyRunConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "RewardConfig",
    "RunDirConfig",
    "ScheduleConfig",
    "StepsConfig",
    "TracingConfig",
]


class DataConfig(Section):
    """The training and validation rows, and how many make a step."""

    train_files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files of training rows (.jsonl, .parquet or .arrow) and directories of them, read in this
    order. A file on the Hugging Face Hub is hf://datasets/ORG/NAME/PATH. In a name `*` stands for
    any characters. An environment that makes its rows and rewards itself is LIBRARY:NAME, such as
    textarena:GuessTheNumber-v0, or a .yaml file with its settings (docs/environments.md)."""
    val_files: tuple[Path, ...] = ()
    """Files of validation rows. Empty: the run never validates."""
    prompts_per_step: Count = 16
    """Rows per training step; each gives rollout.samples_per_prompt trajectories."""
    shuffle: bool = True
    """Shuffle the rows for each epoch, seeded by run.seed; false keeps the file order."""
    weights: Mapping[str, float] = {}
    """How much of a step each `data_source` of the training rows gives (docs/data.md): every step
    begins the same number of rows of each. Empty: rows are drawn from all of them alike."""
    reader: str | None = None
    """Your own reader of train_files and val_files as path.py:Class or package.module:Class, called
    with each path; it gives the rows as mappings. Null: files are read by their type."""
    streaming: bool = False
    """Leave the training rows in their files, which must then stay as they are, and read each when
    a step needs it: for data larger than memory. Best for .jsonl and .arrow; of .parquet a whole
    row group is read for a row. Order and results are the same."""
    overlong_prompts: Literal["error", "drop", "left", "right", "middle"] = "error"
    """What to do with a row whose rendered prompt exceeds rollout.prompt_length: stop before
    training, drop the row, or cut out the left, right or middle part of its longest message. The
    number of such rows is reported."""
    max_val_rows: Count | None = None
    """Maximum number of validation rows, counted from the first; null means all."""

    @field_validator("weights")
    @classmethod
    def _weights_are_positive(cls, weights: Mapping[str, float]) -> Mapping[str, float]:
        for name, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"{name} is {weight}; it must be a positive number")
        return weights

    @model_validator(mode="after")
    def _streams_files(self) -> Self:
        if self.streaming and self.reader is not None:
            raise ValueError(
                f"streaming=true reads single rows of files, and reader={self.reader} gives them "
                "one after another: set one of the two"
            )
        return self


class ModelConfig(Section):
    """The weights that training starts from."""

    path: Path
    """Directory of a Hugging Face model: config.json, safetensors and tokenizer; a run directory,
    for the model that it trained; a small model that ships with Treadle, demo:calculator or
    demo:math_expression; or an id on the Hugging Face Hub, as ORG/NAME or ORG/NAME@REVISION, which
    is downloaded into the Hub's cache. It must be readable under the same path on every node."""


class RewardConfig(Section):
    """How a finished trajectory is scored."""

    name: str | tuple[str, ...] | None = None
    """The reward of all rows: a name from treadle.tools.rewards or an installed package, or your
    own function as path.py:function or package.module:function, or a rubric.yaml for a language
    model that judges, or a reward_model.yaml for one with a scalar head. Of a list, the results are
    added by `weights`. Null: chosen by each row's data_source."""
    weights: Mapping[str, float] = {}
    """Weights of several rewards by the function's name, as `reward.weights.short=0.2` of
    game.py:short; 1 for each without. The metric `reward/short` has its results without the
    weight."""
    mode: str | None = None
    """How a named reward with several modes reads or scores an answer. gsm8k: strict (the number
    after `#### `) and flexible (the last number) with verl's quirks, fixed without them;
    math_dapo: minerva, boxed; retool: shaped, flat, capped; hotpotqa: em, f1. Null: the reward's
    first mode."""
    timeout_s: Seconds | None = None
    """Maximum time to score one trajectory, in a separate process. Null: agent.deadline_s bounds
    it, except for rewards that have their own limit (geometry3k). Your own function runs in a
    separate process in any case, unless it is async."""
    timeout_score: float = 0.0
    """Reward of a trajectory that could not be scored within `timeout_s`; `reward/timeouts` counts
    them."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 0.0
    """What a response of rollout.response_length tokens loses of its reward in training; shorter
    ones lose less, those outside the buffer nothing (DAPO's soft overlong punishment)."""
    overlong_buffer: Count | None = None
    """Number of tokens at the end of rollout.response_length over which the penalty grows from 0.
    Null: a fifth of rollout.response_length, as in DAPO's run."""

    @property
    def names(self) -> tuple[str, ...]:
        """All that `name` has; empty where it is null."""
        return (self.name,) if isinstance(self.name, str) else self.name or ()


class AgentConfig(Section):
    """How one trajectory runs, and when it ends."""

    default_loop: str = "single_turn_agent"
    """Agent loop of rows without an `agent_name`: single_turn_agent, tool_agent, one of `loops`,
    one that an installed package provides, path.py:Class or package.module:Class."""
    loops: Mapping[str, str] = {}
    """Your own agent loops as path.py:Class or package.module:Class, by the name that rows give in
    `agent_name`. Installed packages add theirs by entry points (treadle.agent_loops)."""
    tool_catalogue: Path | None = None
    """YAML list of tools (verl's tool_config format), a Python file with functions under
    `@function_tool`, or path.py:Class, whose typed public methods are tools. Null: no tools."""
    interaction_catalogue: Path | None = None
    """YAML list of simulated users (verl's interaction_config format). A row chooses one by
    extra_info.interaction_kwargs.name. Null: none."""
    parser: str | None = None
    """Format of tool calls and reasoning in the model's text: cohere_command3,
    cohere_command4, deepseek, deepseek_v32, gemma4, glm, gpt_oss, hermes, kimi, kimi_k3, lfm2,
    lfm2_5, llama3_json, minimax, minimax_m1, minimax_m3, mistral, qwen3 (hermes with separate
    reasoning), qwen3_5, qwen3_coder; or what vLLM or SGLang call one of these. Null: derived from
    the model's chat template."""
    template_kwargs: Mapping[str, Any] = {}
    """Variables for the chat template besides messages and tools, such as enable_thinking."""
    on_malformed_call: Literal["answer", "ignore"] = "answer"
    """What to do with a tool call that does not parse: tell the model why, or ignore it as verl
    does."""
    unclosed_reasoning: Literal["call", "malformed"] = "call"
    """What a complete call is with which a turn ends whose reasoning was never closed. call: it is
    made, as vLLM and SGLang do. malformed: it counts and is answered as a malformed call."""
    max_assistant_turns: Count | None = None
    """Maximum number of completions in a trajectory. Null: no limit."""
    max_user_turns: Count | None = None
    """Maximum number of answers to the model in a trajectory: rounds of tool results and replies of
    a simulated user. Null: no limit."""
    max_parallel_calls: Count = 1
    """Maximum number of tool calls to run per turn; the others are dropped and counted."""
    max_tool_response_chars: Count | None = 256
    """Maximum length of a tool result, in characters. Null: no limit."""
    max_tool_response_tokens: Count | None = None
    """Maximum length of a tool result, in tokens. Null: no limit."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer tool result to cut out."""
    tool_timeout_s: Seconds = 60.0
    """Maximum duration of one tool call; the model is told when a call took too long."""
    deadline_s: Seconds = 600.0
    """Maximum duration of one trajectory, including tools and time in queues."""
    watchdog_s: Seconds | None = 300.0
    """Warn about a trajectory without progress for this time, with what it waits for. A completion
    counts as one event, however long it takes. Null: never."""
    max_attempts: Count = 2
    """Maximum attempts at a trajectory that fails for a reason other than the model; 1: no
    retry."""
    max_consecutive_failures: Count | None = 32
    """A tool, a reward or a simulated user that failed this many trajectories one after another, or
    as many as a step has, is down. If it had served one in this run, the run waits for it; else the
    run ends. Null: the run continues with the trajectories that did without it."""
    try_once: bool = True
    """Before the start, call your own plain rewards with a made-up answer to the first row, and
    open and close your own tools for it, so that a mistake in them is found there."""
    max_failed_share: Annotated[float, Field(ge=0, le=1)] | None = 0.25
    """Share of a step's trajectories that may fail because the reward or the agent loop raises or
    returns what is no reward. Above it the run ends with status 1 and names each cause: what is
    left would be a biased sample. What cannot be reached or takes too long does not count. Null:
    the run continues without them."""
    outage_s: Seconds = 600.0
    """How long the run waits for what is down, trying one trajectory now and then. After that it
    ends; the same command continues from the latest checkpoint."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Number of processes that run the agent loops, with their tools and rewards; Ray spreads them
    over its nodes. 0: the trainer's own process runs them (docs/workers.md)."""
    max_worker_restarts: Annotated[int, Field(ge=0)] = 8
    """Maximum number of restarts per run of loop workers that died, and of the router that they
    share. After that the run continues with the remaining workers, and ends when none remains."""

    @field_validator("parser")
    @classmethod
    def _parser_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in (*PARSER_NAMES, *PARSER_ALIASES):
            raise ValueError(f"unknown parser; known are: {', '.join(PARSER_NAMES)}")
        return name

    @field_validator("loops")
    @classmethod
    def _loops_are_named_in_full(cls, loops: Mapping[str, str]) -> Mapping[str, str]:
        for name, target in loops.items():
            if ":" not in target:
                raise ValueError(f"{name} is {target!r}; it must be package.module:Class")
        return loops


class StepsConfig(Section):
    """The number of steps, validation and checkpoints, of every kind of run."""

    total_steps: Count | None = None
    """Number of training steps. Null: as many as total_epochs give."""
    total_epochs: Count = 1
    """Number of passes over the training rows, if total_steps is null."""
    val_every: Count | None = None
    """Number of steps between validations; the last step also validates. Null: no validation during
    training."""
    val_before_train: bool = True
    """Validate before the first step."""
    save_every: Count | None = None
    """Number of steps between checkpoints. Null: none at a number of steps."""
    save_minutes: Annotated[float, Field(gt=0)] | None = 30.0
    """A step also ends with a checkpoint when this long has passed since the last one, or since the
    start. Null: time does not count. An interrupted run (Ctrl-C, SIGTERM) also saves its last step,
    unless the settings turn off all checkpoints."""
    save_last: bool = True
    """Save a checkpoint after the last step."""
    save_hf: Literal["never", "last", "every"] = "last"
    """Which checkpoints also hold the model as a Hugging Face directory (`hf`), for transformers,
    vLLM, SGLang and the next run: none, that of the last step, or each. `treadle export` makes it
    of any checkpoint later."""
    keep_checkpoints: Count = 2
    """Number of checkpoints to keep, the latest ones."""

    @property
    def resumable(self) -> bool:
        """Whether a run is to leave a checkpoint before its last step."""
        return self.save_every is not None or self.save_minutes is not None

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a run is to leave a checkpoint."""
        return self.save_last or self.resumable

    def when_saved(self) -> str:
        """Returns when there is a checkpoint, for the plan."""
        if not self.keeps_checkpoints:
            return "never: the trained model will be lost"
        times = [*self._times_saved(), "when interrupted"]
        return " and ".join([", ".join(times[:-1]), times[-1]])

    def _times_saved(self) -> list[str]:
        often = "" if self.save_every is None else f"every {self.save_every} steps"
        minutes = "" if self.save_minutes is None else f"after {self.save_minutes:g} minutes"
        last = "after the last step" if self.save_last else ""
        return [each for each in (often, minutes, last) if each]

    def validates(self, step: int, *, last: bool) -> bool:
        """Returns whether a step ends with a validation."""
        return self.val_every is not None and (last or step % self.val_every == 0)

    def saves(self, step: int, *, last: bool) -> bool:
        """Returns whether a step ends with a checkpoint, whatever the time is.

        A step that does keeps no groups for the next one, and a run must not depend on the clock.
        """
        due = self.save_every is not None and step % self.save_every == 0
        return due or (last and self.save_last)

    def saves_hf(self, step: int, *, last: bool) -> bool:
        """Returns whether the checkpoint of a step also holds a Hugging Face directory."""
        return self.save_hf == "every" or (last and self.save_hf == "last")

    def is_time_to_save(self, saved_at: float) -> bool:
        """Returns whether the last checkpoint, in monotonic seconds, is older than save_minutes."""
        return time.monotonic() - saved_at > 60 * (self.save_minutes or math.inf)


class ScheduleConfig(StepsConfig):
    """The order and number of steps, validation and checkpoints."""

    kind: Literal["sync", "overlap", "stream", "async"] = "sync"
    """When groups (the trajectories of one row) are sampled and trained on. sync: rollout, reward,
    update and weight sync take turns, so every token is on-policy. overlap: the rows of a step are
    sampled while the step before it trains. stream: a step trains on the groups that end first, and
    the others are carried over. async: sampling never stops while staleness stays within
    max_staleness."""
    surplus: Annotated[float, Field(ge=0)] = 0.5
    """stream: how many more groups are in progress than a step trains on, as a share of
    data.prompts_per_step."""
    best: Literal["val/reward", "val/accuracy"] | None = None
    """Metric whose greatest value makes a validation's step the best of the run: each validation
    then ends with a checkpoint, that of the best is kept beside keep_checkpoints, and stands for
    the run in model.path, `treadle eval` and `treadle export`. A run that resumes, or is set back,
    compares the checkpoints that it has up to there anew. Null: the latest does."""
    patience: Count | None = None
    """The run ends early after this many validations in a row that are not better than `best`.
    Null: it does not."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """async: how many versions behind the weights may be that a group began with, when a step
    trains on it."""

    @property
    def resumable(self) -> bool:
        """Whether a run is to leave a checkpoint before its last step."""
        return super().resumable or self.best is not None

    def saves(self, step: int, *, last: bool) -> bool:
        """Returns whether a step ends with a checkpoint: those that validate do with `best`."""
        return super().saves(step, last=last) or self._may_be_best(step, last=last)

    def saves_hf(self, step: int, *, last: bool) -> bool:
        """Returns whether the checkpoint of a step also holds a Hugging Face directory."""
        may_be_best = self.save_hf != "never" and self._may_be_best(step, last=last)
        return super().saves_hf(step, last=last) or may_be_best

    def when_saved(self) -> str:
        """Returns when there is a checkpoint, for the plan."""
        best = f"; the greatest {self.best} is kept" if self.best else ""
        return super().when_saved() + best

    def _times_saved(self) -> list[str]:
        return [*super()._times_saved(), *(["with each validation"] if self.best else [])]

    def is_stuck(self, step: int, best: int) -> bool:
        """Returns whether a run ends early after a step, with its best validation at `best`."""
        if self.patience is None or self.val_every is None:
            return False
        return step // self.val_every - best // self.val_every >= self.patience

    def _may_be_best(self, step: int, *, last: bool) -> bool:
        return self.best is not None and self.validates(step, last=last)

    @model_validator(mode="after")
    def _patience_has_validations(self) -> Self:
        if self.best is not None and self.val_every is None:
            raise ValueError(
                f"best={self.best} compares validations, and val_every=null has none: set val_every"
            )
        if self.patience is not None and self.best is None:
            raise ValueError(
                f"patience={self.patience} waits for a better validation, and best=null has none: "
                "set best=val/reward"
            )
        return self

    @model_validator(mode="after")
    def _numbers_have_their_kind(self) -> Self:
        for name, kind in (("surplus", "stream"), ("max_staleness", "async")):
            default = type(self).model_fields[name].default
            if (value := getattr(self, name)) != default and self.kind != kind:
                raise ValueError(
                    f"{name}={value} is read by kind={kind}, and kind={self.kind}: set kind={kind},"
                    f" or leave {name} out"
                )
        return self


def check_max_failures(launch: LocalLaunchConfig | RayLaunchConfig, schedule: StepsConfig) -> None:
    """Rejects a run that is to resume by itself and keeps no checkpoint to resume from.

    Raises:
        ValueError: See above.
    """
    if launch.max_failures and not schedule.resumable:
        raise ValueError(
            f"launch.max_failures={launch.max_failures} resumes from a checkpoint, and "
            "schedule.save_every=null with schedule.save_minutes=null keeps none before the last "
            "step: set one of them, or launch.max_failures=0"
        )


class TracingConfig(Section):
    """Records of what each trajectory did. Spans that a backend does not take are counted."""

    backends: tuple[Literal["jsonl", "mlflow", "otlp", "weave"], ...] = ()
    """Where the spans of trajectories go, to all of these at once: jsonl (traces.jsonl in the run
    directory), weave (W&B Weave, project run.project), mlflow (experiment run.project, at
    MLFLOW_TRACKING_URI or in ~/.local/state/treadle/mlruns.db), otlp (OpenTelemetry, so Langfuse
    and Phoenix too)."""
    token2text: bool = False
    """Add prompt_text and response_text, the decoded tokens, to the output of each completion and
    of the trajectory. Without it, spans have the messages and the number of tokens."""
    sample_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the rows of a step whose trajectories are traced, chosen by a hash of step and row.
    Trajectories that fail are always traced."""
    max_samples_per_step_per_worker: Count | None = None
    """Maximum number of rows of a step, and of a validation, whose trajectories are traced; all
    trajectories of a row are. The name is verl's: the driver counts for all loop workers together.
    Null: no limit."""
    max_bytes: Count | None = None
    """Bytes of traces that a run may write, measured as JSON; then only trajectories that fail are
    traced. Null: no limit."""
    otlp_endpoint: str | None = None
    """Address for otlp, with or without /v1/traces. Null: OTEL_EXPORTER_OTLP_ENDPOINT if set, else
    http://localhost:4318. OTEL_EXPORTER_OTLP_HEADERS holds the keys of a service."""
    otlp_servers: bool = True
    """Rollout servers of the run send their own spans there too, below those of the driver. Their
    environment then needs treadle-tracing[otlp]. They cannot apply sample_rate,
    max_samples_per_step_per_worker or max_bytes, so if one of these is set, they send no spans."""

    @field_validator("backends")
    @classmethod
    def _no_backend_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"names {twice[0]} twice: name each backend once")
        return names


class AnyRunConfig(Section):
    """The run as a whole, of every kind."""

    dir: Path | None = None
    """Directory of everything that the run writes. Null: a new directory below ./runs."""
    project: str = "treadle"
    """Heading of the report, and the project or experiment of the loggers."""
    name: str = "run"
    """Name of the run in the report, in the loggers, and of its directory below ./runs."""
    loggers: tuple[str, ...] = ("console", "jsonl")
    """Where metrics, configuration, validation tables and the end of the run go: any of wandb,
    tensorboard, mlflow, trackio, and your own as path.py:Class or package.module:Class. console
    and jsonl (metrics.jsonl) are always on, as is the report."""
    loggers_timeout_s: Seconds = 60.0
    """Maximum time that the end of the run waits for the loggers and the traces to finish."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port at which Prometheus reads the run's metrics while it trains (GET /metrics); 0 picks a
    free one, which the console names. Null: nothing listens."""
    metrics_host: str = "127.0.0.1"
    """Address to listen on for it. Anyone who reaches it can read the metrics, without a password;
    they hold no text of trajectories."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the data order, of sampling and of training."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: continue from the latest checkpoint in `dir`, if there is one. never: refuse a
    directory that already holds a run. A path, of a run or of RUN/checkpoints/step-N: begin with
    the weights, the optimizer and the step of that checkpoint; one of `dir` itself sets the run
    back to it. The same command given again continues. The model must be the same; other settings
    may differ, and the run reports which."""

    @field_validator("loggers")
    @classmethod
    def _loggers_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if unknown_logger(name):
                known = ", ".join((*ALWAYS, *NAMED))
                raise ValueError(
                    f"unknown logger {name!r}; known are {known}, and your own as path.py:Class"
                )
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"names {twice[0]} twice: name each logger once")
        if same := same_short_name(names):
            raise ValueError(
                f"{same[0]} and {same[1]} would share their log and their files in the run "
                "directory, which are named after the class: rename one of the classes"
            )
        return names


class RunDirConfig(AnyRunConfig):
    """The run as a whole."""

    trajectories_per_step: Annotated[int, Field(ge=0)] = 4
    """Training trajectories to write to trajectories.jsonl after each step, rounded up to whole
    groups (all of one row)."""
    val_trajectories: Annotated[int, Field(ge=0)] = 20
    """Validation trajectories to write to trajectories.jsonl and to the loggers' table after each
    validation, rounded up likewise."""
    trajectories_max_bytes: Annotated[int, Field(ge=0)] = 100_000_000_000
    """Budget of trajectories/, which has all trajectories of every step and validation. Once its
    files have reached it, only failures and what trajectories.jsonl gets are added."""
    rollout_data_dir: Path | None = None
    """Directory for the text of every training trajectory, a file STEP.jsonl per step with verl's
    columns input, output, gts and score. Null: none is written."""
    validation_data_dir: Path | None = None
    """The same for every validation trajectory."""


class Config(Section):
    """The configuration of a run, with defaults, files and arguments merged."""

    data: DataConfig
    model: ModelConfig
    reward: RewardConfig = RewardConfig()
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    policy: PolicyConfig = PolicyConfig()
    sync: WeightSyncConfig = WeightSyncConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    launch: LaunchConfig = LocalLaunchConfig()
    """Where the processes run."""
    tracing: TracingConfig = TracingConfig()
    run: RunDirConfig = RunDirConfig()

    @property
    def used_critic(self) -> CriticConfig | None:
        """The critic's settings; None if there is no critic."""
        return self.critic if self.algorithm.needs_critic else None

    @property
    def overlong_buffer(self) -> int:
        """Tokens of the buffer: as set, or a fifth of the response length."""
        return self.reward.overlong_buffer or max(1, self.rollout.response_length // 5)

    @model_validator(mode="after")
    def _buffer_is_within_the_response(self) -> Self:
        if self.overlong_buffer > self.rollout.response_length:
            raise ValueError(
                f"reward.overlong_buffer={self.overlong_buffer} is the end of "
                f"rollout.response_length={self.rollout.response_length} and exceeds it: lower it"
            )
        return self

    @model_validator(mode="after")
    def _validation_has_rows(self) -> Self:
        if self.schedule.val_every is not None and not self.data.val_files:
            raise ValueError(
                f"schedule.val_every={self.schedule.val_every} asks for validation, but "
                "data.val_files is empty: name a file or set schedule.val_every=null"
            )
        return self

    @model_validator(mode="after")
    def _critic_has_a_reader(self) -> Self:
        if self.critic != CriticConfig() and not self.algorithm.needs_critic:
            changed = self.critic.model_dump(mode="json", exclude_defaults=True)
            raise ValueError(
                f"critic={changed} sets up a critic, and algorithm.advantage="
                f"{self.algorithm.advantage} has none: set algorithm.advantage=gae, or leave out "
                "critic"
            )
        return self

    @model_validator(mode="after")
    def _served_reference_scores_the_whole_vocabulary(self) -> Self:
        addresses, other = self.algorithm.reference_addresses, self.rollout.truncation
        if self.rollout.temperature != 1:
            other = f"rollout.temperature={self.rollout.temperature}"
        if addresses and other is not None:
            raise ValueError(
                f"{other} and algorithm.reference_addresses={list(addresses)}: rollout servers "
                "score the tokens of a prompt at temperature 1 and over the whole vocabulary. Set "
                "rollout.temperature=1, rollout.top_p=1, rollout.top_k=null and rollout.min_p=0, "
                "or name the model with algorithm.reference_path"
            )
        return self

    @model_validator(mode="after")
    def _routing_is_reported(self) -> Self:
        rollout = self.rollout
        if self.policy.moe.routing_replay and (
            rollout.name == "vllm" and not rollout.enable_prefix_caching
        ):
            raise ValueError(
                "policy.moe.routing_replay=true needs the experts that the engine chose, and "
                "rollout.name=vllm keeps them with its prefix cache: set "
                "rollout.enable_prefix_caching=true, or policy.moe.routing_replay=false"
            )
        return self

    @model_validator(mode="after")
    def _processes_have_gpus(self) -> Self:
        make_topology(self.launch, self.policy, self.rollout)
        return self

    @model_validator(mode="after")
    def _resumes_from_a_checkpoint(self) -> Self:
        check_max_failures(self.launch, self.schedule)
        return self

    @model_validator(mode="after")
    def _shared_devices_take_turns(self) -> Self:
        if self.rollout.release_memory and self.schedule.kind in ("overlap", "async"):
            raise ValueError(
                "rollout.release_memory=true takes the servers' memory while the policy trains, "
                f"and schedule.kind={self.schedule.kind} samples then: set schedule.kind=sync or "
                "stream, or give policy and servers different GPUs with launch.placement=separate, "
                "or rollout.release_memory=false"
            )
        return self

    @model_validator(mode="after")
    def _rows_are_replaced_within_a_step(self) -> Self:
        if self.schedule.kind == "overlap" and self.algorithm.dynamic_sampling is not None:
            raise ValueError(
                f"algorithm.dynamic_sampling={self.algorithm.dynamic_sampling} replaces rows of a "
                "step by later ones, and schedule.kind=overlap has the rows of each step begun "
                "with the step before: set schedule.kind=sync, stream or async"
            )
        return self

    @model_validator(mode="after")
    def _released_memory_keeps_nothing(self) -> Self:
        if self.rollout.release_memory and self.sync.in_flight == "continue":
            raise ValueError(
                "rollout.release_memory=true gives the KV cache away, and sync.in_flight=continue "
                "keeps completions in it: set sync.in_flight=drain or interrupt"
            )
        return self
