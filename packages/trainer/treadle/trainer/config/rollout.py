"""The rollout servers, and how a run samples from them: the section `rollout`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from treadle.policy.config.base import Count, Seconds, Section

__all__ = ["RolloutConfig", "ValidationSamplingConfig"]


class ValidationSamplingConfig(Section):
    """Sampling settings of validation; training's are in `rollout`."""

    samples_per_prompt: Count = 1
    """Trajectories per validation row; val/reward is the mean over all of them. Above 1, each data
    source also has mean@n, best@k, worst@k and maj@k."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: cumulative probability of the tokens to sample from."""
    top_k: Count | None = None
    """Number of most likely tokens to sample from. Null: the whole vocabulary."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens that have at least this share of the likeliest one's probability."""


class RolloutConfig(Section):
    """The rollout servers, and how training samples from them."""

    name: Literal["fake", "torch", "vllm", "vllm_stock", "sglang"] = "torch"
    """The inference engine. fake: deterministic and without a model, to try out a configuration.
    vllm_stock: a vLLM of any release from 0.28 on, with fewer features than vllm."""
    server_command: tuple[str, ...] = ()
    """Program and leading arguments that start a server in its engine's own environment, such as
    /opt/vllm/bin/treadle-rollout-server; the server does not see the trainer's Python. With Ray it
    must be on every node. Empty: the trainer's interpreter, which must then have the engine."""
    start_deadline_s: Seconds = 600.0
    """Maximum time for a server to load its engine and model."""
    num_replicas: Annotated[int, Field(ge=0)] = 1
    """Number of rollout servers that the run starts; trajectories are spread over them. With
    `addresses`, none unless it is set."""
    addresses: tuple[str, ...] = ()
    """host:port of rollout servers that someone else runs. The run samples on them and gives them
    weights; it neither starts nor ends them. They must require the token of `token_file`, or none,
    and use TLS if `tls_roots` is set. One that does not answer is waited for at the start, up to
    `start_deadline_s`; one that dies is used again when it is back."""
    samples_per_prompt: Count = 8
    """Trajectories per row, that is the size of a GRPO group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature in training; the policy is trained at the same temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling in training: cumulative probability of the tokens to sample from. Below 1,
    and with top_k or min_p, servers must report which tokens were kept (`sampling_mask`; not
    vllm_stock), and the policy's distribution is over these too."""
    top_k: Count | None = None
    """Number of most likely tokens to sample from in training. Null: the whole vocabulary."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample in training from tokens that have at least this share of the likeliest one's
    probability."""
    prompt_length: Count = 512
    """Maximum number of tokens of a rendered prompt, including tool schemas."""
    response_length: Count = 512
    """Maximum number of tokens after the prompt, including tool results."""
    max_in_flight: Count = 64
    """Maximum number of completions that one server computes at a time."""
    cache_tokens: Count | None = None
    """Number of tokens that one server's prefix cache holds. A trajectory then waits until it fits
    into the cache of a server with the trajectories already there, so that long ones do not evict
    each other. Null: no trajectory waits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the servers' weights, and of the weights pushed to them."""
    threads: Count | None = None
    """CPU threads per server. Null: all CPUs, divided by the number of replicas."""
    tls_certificate: Path | None = None
    """PEM file of a certificate that names the servers' hosts. Servers then use TLS for requests
    and for weights. This file, `tls_key`, `tls_roots` and `token_file` must be on every node. Null:
    on a Ray cluster the run makes certificates, and brings them to each node itself."""
    tls_key: Path | None = None
    """PEM file of the certificate's private key."""
    tls_roots: Path | None = None
    """PEM file of the root certificates that the certificate is checked against. Null: the
    system's."""
    tls_server_name: str | None = None
    """Name in the servers' certificate, where it is not that of their hosts. Null: the host of each
    address."""
    token_file: Path | None = None
    """File with the bearer token that the servers require in every call. Null: the run creates a
    token, unless it uses TLS or `launch.allow_plaintext_on_network`."""
    tensor_model_parallel_size: Count = 1
    """Number of devices that one copy of the weights is split over, per server (vllm, sglang)."""
    data_parallel_size: Count = 1
    """Number of copies of the weights per server (vllm, sglang)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's memory for weights and KV cache (vllm, sglang). Null: the engine's
    default."""
    kv_cache_bytes: Count | None = None
    """Size of the KV cache in bytes when there is no GPU (vllm, sglang). Null: the engine's
    default."""
    max_num_batched_tokens: Count | None = None
    """Maximum number of tokens, including prompt tokens, per engine step (vllm, sglang). Null: the
    engine's default."""
    enforce_eager: bool = False
    """Do not compile or capture CUDA graphs, for a faster start (vllm, sglang)."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of a prompt for the next turn and for prompts with the same prefix (vllm,
    sglang; torch always does)."""
    max_draft_tokens: Annotated[int, Field(ge=0, le=32)] = 0
    """Maximum number of tokens that the torch engine drafts per sequence in a pass of the model,
    out of texts that it has seen: the session's own, other samples of its prompt, earlier rollouts
    of the row. Output is that without drafts in float32 on a CPU, and up to rounding elsewhere.
    0: none."""
    batch_invariant: bool = False
    """The torch engine gives a token the same bits whatever else it computes at a time, in float32
    on a CPU with MKL; not for models with experts. On with drafts where it can be."""
    engine_args: Mapping[str, JsonValue] = {}
    """Further engine arguments (vllm: AsyncEngineArgs, sglang: ServerArgs) that no key here sets;
    the server rejects arguments that its engine does not have."""
    release_memory: bool = False
    """Release the servers' device memory while the policy trains, for a trainer on the same
    devices: weights and KV cache are released after the rollout and restored before the next
    one."""
    multi_stage_wake_up: bool = False
    """With release_memory: restore the weights, update them, and only then restore the KV cache, so
    that the cache takes no memory during the update. False: restore both before the update."""
    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Maximum number of restarts per run of servers that died, or were killed while they started.
    After that the run continues with the remaining replicas, and fails when none remains, or when
    one that is killed has never served."""
    unresponsive_s: Seconds = 60.0
    """If no server answers, the run waits this long for one; then they count as dead, are ended and
    started again. So long a loop worker, their router or a server of someone else may be silent,
    too, before it counts as dead."""
    val: ValidationSamplingConfig = ValidationSamplingConfig()
    """Sampling settings of validation."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a trajectory, prompt included."""
        return self.prompt_length + self.response_length

    @property
    def truncation(self) -> str | None:
        """The setting that leaves tokens out in training, for messages; None: none does."""
        if self.top_p < 1:
            return f"rollout.top_p={self.top_p}"
        if self.top_k is not None:
            return f"rollout.top_k={self.top_k}"
        return f"rollout.min_p={self.min_p}" if self.min_p else None

    @model_validator(mode="before")
    @classmethod
    def _addresses_replace_replicas(cls, given: object) -> object:
        if isinstance(given, Mapping) and given.get("addresses") and "num_replicas" not in given:
            return {**given, "num_replicas": 0}
        return given

    @model_validator(mode="after")
    def _has_servers(self) -> Self:
        for address in self.addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ValueError(f"addresses has {address!r}, which is not host:port")
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"addresses={list(self.addresses)} has one of them twice")
        if not self.addresses and not self.num_replicas:
            raise ValueError("num_replicas=0 leaves no server: set addresses, or at least 1")
        if not self.addresses:
            return self
        if self.release_memory:
            raise ValueError(
                f"release_memory=true lends the servers' devices to the policy, and addresses="
                f"{list(self.addresses)} are servers of someone else: set release_memory=false"
            )
        if self.num_replicas and self.token_file is None and self.tls_certificate is None:
            raise ValueError(
                f"num_replicas={self.num_replicas} servers are started beside addresses="
                f"{list(self.addresses)}, and all must require one token: set token_file"
            )
        return self

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                f"tls_certificate={self.tls_certificate} and tls_key={self.tls_key} belong "
                "together: set both or neither"
            )
        starts_plain = self.num_replicas and self.tls_certificate is None
        if self.tls_server_name is not None and self.tls_certificate is self.tls_roots is None:
            raise ValueError(
                f"tls_server_name={self.tls_server_name} is a name in a certificate, and neither "
                "tls_certificate nor tls_roots is set"
            )
        if self.tls_roots is not None and starts_plain:
            raise ValueError(
                f"tls_roots={self.tls_roots} checks a certificate, and tls_certificate is null"
            )
        return self

    @model_validator(mode="after")
    def _wakes_up_from_something(self) -> Self:
        if self.multi_stage_wake_up and not self.release_memory:
            raise ValueError(
                "multi_stage_wake_up=true needs released memory, and release_memory=false: set "
                "rollout.release_memory=true"
            )
        return self
