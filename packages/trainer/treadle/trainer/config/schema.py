"""The run's configuration: one tree, whose leaves each have one default, one doc and bounds.

The attribute docstrings are the documentation: `--help` and docs/config.md are made of them.
Cross-field checks live in the smallest section that sees both fields and quote both values.
`policy` and `algorithm` are declared beside their users, in their own modules.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from treadle.agent_loop.parsers import PARSER_NAMES
from treadle.trainer.config.algorithm import AlgorithmConfig
from treadle.trainer.config.base import Section
from treadle.trainer.config.policy import PolicyConfig

__all__ = [
    "AgentConfig",
    "AlgorithmConfig",
    "CollectiveTransportConfig",
    "DataConfig",
    "FileTransportConfig",
    "InFlight",
    "InlineTransportConfig",
    "LocalLaunchConfig",
    "ModelConfig",
    "PolicyConfig",
    "RayLaunchConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "RunDirConfig",
    "ScheduleConfig",
    "SharedMemoryTransportConfig",
    "TracingConfig",
    "ValidationSamplingConfig",
    "WeightSyncConfig",
]

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
InFlight = Literal["drain", "interrupt", "continue"]


def _kind_alone(value: object) -> object:
    """Reads `ray` as `{kind: ray}`, so that a variant without settings needs one word."""
    return {"kind": value} if isinstance(value, str) else value


class DataConfig(Section):
    """Where the questions come from, and how many make a step."""

    train_files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Files of training rows (.jsonl or .parquet), read in this order."""
    val_files: tuple[Path, ...] = ()
    """Files of validation rows. Empty: the run never validates."""
    prompts_per_step: Count = 16
    """Rows per training step; each gives rollout.samples_per_prompt trajectories."""
    shuffle: bool = True
    """Draw a new order of the rows for each epoch, from run.seed; false: file order."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a row whose rendered prompt exceeds rollout.prompt_length: stop before
    training, or leave the row out and say how many were left out."""
    max_val_rows: Count | None = None
    """Validate on the first so many rows only. Null: on all."""


class ModelConfig(Section):
    """The weights that training starts from."""

    path: Path
    """Directory of a Hugging Face model: config.json, safetensors and tokenizer. It must be
    readable under the same path on every node."""


class RewardConfig(Section):
    """How a finished trajectory is scored."""

    name: str | None = None
    """A reward for all rows: a name of treadle.tools.rewards or of an installed package, or one of
    your own as path.py:function or package.module:function. Null: by each row's data_source."""
    mode: str | None = None
    """How the named rewards read or score an answer, where they know several ways. gsm8k: strict
    (the number after `#### `) and flexible (the last number) with verl's quirks, fixed without
    them; math_dapo: minerva, boxed; retool: shaped, flat, capped; hotpotqa: em, f1. Null: each
    one's first."""
    timeout_s: Seconds | None = None
    """Longest duration of scoring one trajectory, in a process of its own. Null: no limit, except
    for rewards that have one themselves (geometry3k)."""
    timeout_score: float = 0.0
    """What a trajectory gets that could not be scored within `timeout_s`; `reward/timeouts` counts
    them."""


class AgentConfig(Section):
    """How one trajectory runs, and when it ends."""

    default_loop: str = "single_turn_agent"
    """The loop of rows without an `agent_name`: single_turn_agent, tool_agent, one of `loops`, one
    that an installed package offers, or package.module:Class."""
    loops: Mapping[str, str] = {}
    """Agent loops of your own, by the name that rows give in `agent_name`, as
    package.module:Class. Installed packages add theirs by entry points (treadle.agent_loops)."""
    tool_catalogue: Path | None = None
    """YAML list of tools (verl's tool_config format). Null: no tools."""
    interaction_catalogue: Path | None = None
    """YAML list of simulated users (verl's interaction_config format), which answer the model in
    the rows that name one in extra_info.interaction_kwargs.name. Null: none."""
    parser: str | None = None
    """How tool calls and reasoning are written in the model's text: deepseek, deepseek_v32, glm,
    gpt_oss, hermes, kimi, kimi_k3, llama3_json, minimax, mistral, qwen3 (hermes with reasoning set
    apart), qwen3_5, qwen3_coder. Null: as the model's chat template writes them."""
    template_kwargs: Mapping[str, Any] = {}
    """What the chat template is given besides messages and tools, as enable_thinking."""
    on_malformed_call: Literal["answer", "ignore"] = "answer"
    """A tool call that does not parse: tell the model why, or ignore it as verl does."""
    max_assistant_turns: Count | None = None
    """End the trajectory after so many completions. Null: no limit."""
    max_user_turns: Count | None = None
    """End the trajectory after so many answers: rounds of tool results, and replies of an
    interaction. Null: no limit."""
    max_parallel_calls: Count = 1
    """Calls of one turn that are run; the others are left out and counted."""
    max_tool_response_chars: Count | None = 256
    """Longest tool result that the model is shown, in characters. Null: no limit."""
    max_tool_response_tokens: Count | None = None
    """Longest tool result that the model is shown, in tokens. Null: no limit."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer tool result is cut out."""
    tool_timeout_s: Seconds = 60.0
    """Longest duration of one tool call; then the model is told that it took too long."""
    deadline_s: Seconds = 600.0
    """Longest duration of one trajectory, tools and queues included."""
    watchdog_s: Seconds | None = 300.0
    """Warn about a trajectory in which nothing has happened for so long (a completion is one
    thing, however long), and say what it waits for. Null: never."""
    max_attempts: Count = 2
    """Attempts at a trajectory that fails through no fault of the model; 1: no retry."""

    @field_validator("parser")
    @classmethod
    def _parser_exists(cls, name: str | None) -> str | None:
        if name is not None and name not in PARSER_NAMES:
            raise ValueError(f"there is no such parser; there are {', '.join(PARSER_NAMES)}")
        return name

    @field_validator("loops")
    @classmethod
    def _loops_are_named_in_full(cls, loops: Mapping[str, str]) -> Mapping[str, str]:
        for name, target in loops.items():
            if ":" not in target:
                raise ValueError(f"{name} is {target!r}; it must be package.module:Class")
        return loops


class ValidationSamplingConfig(Section):
    """Sampling settings of validation; training's are in `rollout`."""

    samples_per_prompt: Count = 1
    """Trajectories per validation row; accuracy is the mean over all of them."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus to sample from."""
    top_k: Count | None = None
    """Most likely tokens to sample from. Null: the whole vocabulary."""


class RolloutConfig(Section):
    """The rollout servers and how training samples from them."""

    name: Literal["fake", "torch", "vllm", "sglang"] = "torch"
    """The engine. fake: deterministic, without a model, for trying out a configuration."""
    server_command: tuple[str, ...] = ()
    """Program and leading arguments that start a server in its engine's own environment, as
    /opt/vllm/bin/treadle-rollout-server; it sees nothing of the trainer's Python. With Ray it must
    be on every node. Empty: this run's interpreter, which must then have the engine."""
    start_deadline_s: Seconds = 600.0
    """Longest wait for a server to load its engine and model."""
    num_replicas: Count = 1
    """Rollout servers; trajectories spread over them."""
    samples_per_prompt: Count = 8
    """Trajectories per row: the size of a GRPO group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature in training; the policy is trained at the same one."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus to sample from in training. Below 1, as with top_k, the servers report
    log-probabilities of the truncated distribution, and `rollout/logprob_diff_*` shows how far
    that is from the policy that is trained."""
    top_k: Count | None = None
    """Most likely tokens to sample from in training. Null: the whole vocabulary."""
    prompt_length: Count = 512
    """Longest rendered prompt, in tokens, tool schemas included."""
    response_length: Count = 512
    """Longest rest of a trajectory after the prompt, in tokens, tool results included."""
    max_in_flight: Count = 64
    """Completions that one server computes at a time."""
    cache_tokens: Count | None = None
    """Tokens of trajectories that one server's prefix cache holds. A trajectory then waits for its
    place until those at its server fit together, so that long ones do not push each other out.
    Null: no trajectory waits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the servers' weights, and of the weights pushed to them."""
    threads: Count | None = None
    """CPU threads of one server. Null: all CPUs, divided by the replicas."""
    tls_certificate: Path | None = None
    """PEM file of a certificate that names the servers' hosts. Servers then speak TLS, to the
    agent loops and for weights. Here, as with the next three, it must be on every node."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    tls_roots: Path | None = None
    """PEM file of what the certificate is checked against. Null: the system's certificates."""
    token_file: Path | None = None
    """File of a bearer token that the servers want with every call."""
    tensor_model_parallel_size: Count = 1
    """Devices that one copy of the weights is split over, in one server (vllm, sglang)."""
    data_parallel_size: Count = 1
    """Copies of the weights in one server (vllm, sglang)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory for weights and KV cache (vllm, sglang). Null: the engine's own
    choice."""
    kv_cache_bytes: Count | None = None
    """Memory of the KV cache where there is no GPU (vllm, sglang). Null: the engine's own
    choice."""
    max_num_batched_tokens: Count | None = None
    """Most tokens, prompts' included, that one step of the engine reads (vllm, sglang). Null: the
    engine's own choice."""
    enforce_eager: bool = False
    """Compile and capture nothing, for a faster start (vllm, sglang)."""
    enable_prefix_caching: bool = True
    """Keep what was computed for a prompt for the next turn, and for prompts that begin alike."""
    engine_args: Mapping[str, JsonValue] = {}
    """Arguments of the engine's own (vllm: AsyncEngineArgs, sglang: ServerArgs) that no key here
    sets; the server refuses what its engine does not have."""
    release_memory: bool = False
    """Let the servers give their device memory away while the policy trains, for a trainer on the
    same devices: weights and KV cache go after the rollout, and are back before the next one."""
    multi_stage_wake_up: bool = False
    """With release_memory: take the weights back, update them, and only then the KV cache, so that
    the cache is not there while the update is. False: take both back before the update."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a run a server that died is started again; then the run goes on with the
    replicas that are left, and fails when none is."""
    val: ValidationSamplingConfig = ValidationSamplingConfig()
    """Sampling settings of validation."""

    @property
    def context_length(self) -> int:
        """Tokens of the longest trajectory."""
        return self.prompt_length + self.response_length

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                f"tls_certificate={self.tls_certificate} and tls_key={self.tls_key} belong "
                "together: set both, or neither"
            )
        if self.tls_roots is not None and self.tls_certificate is None:
            raise ValueError(
                f"tls_roots={self.tls_roots} checks a certificate, and tls_certificate is null"
            )
        return self

    @model_validator(mode="after")
    def _wakes_up_from_something(self) -> Self:
        if self.multi_stage_wake_up and not self.release_memory:
            raise ValueError(
                "multi_stage_wake_up=true says how released memory is taken back, and "
                "release_memory=false releases none: set rollout.release_memory=true"
            )
        return self


class InlineTransportConfig(Section):
    """Weights travel in the gRPC stream. For small models and servers on other hosts."""

    kind: Literal["inline"] = "inline"
    chunk_bytes: Annotated[int, Field(ge=4096, le=4_000_000)] = 1 << 20
    """Bytes per message; a server may ask for less."""


class FileTransportConfig(Section):
    """Weights travel as safetensors files that the servers can read."""

    kind: Literal["file"] = "file"
    directory: Path | None = None
    """Where the files are written; the servers read below it only. Null: in the run directory."""


class SharedMemoryTransportConfig(Section):
    """Weights travel in memory that policy ranks and servers of one host share; the fastest way."""

    kind: Literal["shared_memory"] = "shared_memory"
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 16 << 20
    """Most bytes of a bucket, unless a single weight is larger. With shared_memory (default 16 MiB)
    each rank that sends holds two, with collective (256 MiB) each member of the group. In shared
    memory a larger weight is split, but for vLLM and SGLang in place, which take it whole."""


class CollectiveTransportConfig(Section):
    """Weights travel through a torch.distributed group, always in place; for GPUs, many servers."""

    kind: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"] = "gloo"
    """gloo: through host memory, everywhere. nccl: from GPU to GPU, of which each policy rank and
    each worker of a server must have its own. Neither encrypts."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 1 << 28
    """Most bytes of a bucket, unless a single weight is larger. With shared_memory (default 16 MiB)
    each rank that sends holds two, with collective (256 MiB) each member of the group. In shared
    memory a larger weight is split, but for vLLM and SGLang in place, which take it whole."""
    timeout_s: Annotated[float, Field(gt=0, le=300)] = 60.0
    """Longest wait for all members to come, and for each broadcast. Then the update begins again
    without the servers that are gone."""


class DeltaConfig(Section):
    """Sending only the elements that changed since the version before."""

    enabled: bool = False
    """Each policy rank then keeps a copy of its weights in host memory, each server one of all of
    them. A server that does not hold the version before gets everything. With transport inline or
    file, not in place."""
    full_every: Count = 50
    """Deltas that may follow one another; then all servers get everything once."""


class WeightSyncConfig(Section):
    """How new weights reach the rollout servers."""

    transport: Annotated[
        Annotated[
            InlineTransportConfig
            | FileTransportConfig
            | SharedMemoryTransportConfig
            | CollectiveTransportConfig,
            Field(discriminator="kind"),
        ],
        BeforeValidator(_kind_alone),
    ] = InlineTransportConfig()
    """What carries the bytes."""
    in_place: bool = False
    """Overwrite the servers' weights one by one as they come, instead of holding a second copy
    until all are there. Completions then wait from the first byte on, as in_flight says, and a
    server whose update breaks samples nothing until a later one succeeds."""
    in_flight: InFlight = "drain"
    """What becomes of completions that run when new weights come. drain: they end first, on the
    weights they began with. interrupt: they stop, and are sent again with what they have.
    continue: they stand still and go on with the new weights, where the engine can. Either way
    each token is labelled with the weights that sampled it."""
    delta: DeltaConfig = DeltaConfig()
    """Sending only what changed."""
    lease_s: Annotated[float, Field(ge=1)] = 60.0
    """A server drops an update after so long without a sign of life from the trainer."""
    control_deadline_s: Seconds = 10.0
    """Deadline of Begin, Get and Abort."""
    push_deadline_s: Seconds = 30.0
    """Deadline of one Push, to which a second per 50 MB is added."""
    commit_deadline_s: Seconds = 120.0
    """Deadline of Commit, in which the server ends its running completions as in_flight says."""
    max_push_attempts: Count = 3
    """Pushes of one update to one server; a broken one resumes where it broke. Begin and Commit are
    asked as often, where their answer got lost."""

    @property
    def updates_in_place(self) -> bool:
        """Whether servers overwrite their weights as new ones come."""
        return self.in_place or isinstance(self.transport, CollectiveTransportConfig)

    @model_validator(mode="after")
    def _delta_fits(self) -> Self:
        fits = isinstance(self.transport, InlineTransportConfig | FileTransportConfig)
        if self.delta.enabled and (self.in_place or not fits):
            raise ValueError(
                "sync.delta.enabled goes with sync.transport.kind=inline or file, and with "
                f"sync.in_place=false, not with {self.transport.kind} and in_place="
                f"{self.in_place}: on one host, shared_memory sends everything faster than a "
                "delta is made"
            )
        return self


class ScheduleConfig(Section):
    """What happens when."""

    kind: Literal["sync"] = "sync"
    """sync: rollout, reward, update and weight sync take turns; every token is on-policy."""
    total_steps: Count | None = None
    """Steps to train. Null: as many as total_epochs make."""
    total_epochs: Count = 1
    """Passes over the training rows, where total_steps is null."""
    val_every: Count | None = None
    """Validate after every so many steps, and after the last. Null: never during training."""
    val_before_train: bool = True
    """Validate before the first step."""
    save_every: Count | None = None
    """Save a checkpoint after every so many steps, and after the last. Null: never."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep."""


class _LaunchConfig(Section):
    policy_threads: Count | None = None
    """CPU threads of one policy rank. Null: all CPUs, divided by the ranks; trainer and servers
    take turns, so they share them."""
    start_deadline_s: Seconds = 300.0
    """Longest wait for a policy rank to start; servers have rollout.start_deadline_s."""


class LocalLaunchConfig(_LaunchConfig):
    """All processes on this machine."""

    kind: Literal["local"] = "local"


class RayLaunchConfig(_LaunchConfig):
    """Processes placed by Ray; Ray carries neither tokens nor weights."""

    kind: Literal["ray"] = "ray"
    address: str | None = None
    """Address of a running cluster, or `auto`. Null: start Ray on this machine."""
    cpus_per_process: Annotated[float, Field(gt=0)] = 1.0
    """CPUs reserved for each process."""
    gpus_per_policy_rank: Annotated[float, Field(ge=0)] = 0.0
    """GPUs reserved for each policy rank."""
    gpus_per_replica: Annotated[float, Field(ge=0)] = 0.0
    """GPUs reserved for each rollout server."""
    allow_plaintext_on_network: bool = False
    """Let processes on other hosts be reached without TLS. Anyone in that network can then use
    the servers; required where the cluster has more than one host."""


LaunchConfig = Annotated[
    Annotated[LocalLaunchConfig | RayLaunchConfig, Field(discriminator="kind")],
    BeforeValidator(_kind_alone),
]


class TracingConfig(Section):
    """Records of what each trajectory did."""

    backend: Literal["none", "jsonl"] = "none"
    """jsonl: spans go to traces.jsonl in the run directory."""


class RunDirConfig(Section):
    """The run as a whole."""

    dir: Path | None = None
    """Where everything that the run writes goes. Null: a new directory below ./runs."""
    project: str = "treadle"
    """Heading of the report."""
    name: str = "run"
    """Name of the run in the report and of its directory below ./runs."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the data order, of sampling and of training."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on from the newest checkpoint in `dir`, where there is one; never: refuse a
    directory that already holds a run."""
    trajectories_per_step: Annotated[int, Field(ge=0)] = 4
    """Training trajectories written to trajectories.jsonl after each step."""
    val_trajectories: Annotated[int, Field(ge=0)] = 20
    """Validation trajectories written to trajectories.jsonl after each validation."""


class RunConfig(Section):
    """Everything a run is told; defaults, files and arguments are already merged."""

    data: DataConfig
    model: ModelConfig
    reward: RewardConfig = RewardConfig()
    agent: AgentConfig = AgentConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    policy: PolicyConfig = PolicyConfig()
    sync: WeightSyncConfig = WeightSyncConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    launch: LaunchConfig = LocalLaunchConfig()
    tracing: TracingConfig = TracingConfig()
    run: RunDirConfig = RunDirConfig()

    @model_validator(mode="after")
    def _validation_has_rows(self) -> Self:
        if self.schedule.val_every is not None and not self.data.val_files:
            raise ValueError(
                f"schedule.val_every={self.schedule.val_every} asks for validation, but "
                "data.val_files is empty: name a file or set schedule.val_every=null"
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
