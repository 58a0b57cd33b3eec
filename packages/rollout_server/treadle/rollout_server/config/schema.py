"""The server's configuration: one tree, defaults here and nowhere else.

Invariant: a `ServerConfig` that exists is valid. Unknown keys, values out of range and
combinations that would open the server to the network by accident do not build one.

Layers, later wins: the defaults, ``--config file.yaml``, the command line. The environment
is not read.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from treadle.rollout_server.address import Address

Positive = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelConfig(_Model):
    """The model that the engine loads."""

    path: Path | None = Field(
        default=None,
        description="Hugging Face directory: config.json, *.safetensors, tokenizer.json.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Element type of the weights in the engine."
    )
    context_length: Positive | None = Field(
        default=None,
        description="Most tokens of prompt plus completion. Unset: what the model allows.",
    )
    num_threads: Positive | None = Field(
        default=None, description="CPU threads of the engine. Unset: the library's own choice."
    )
    max_num_seqs: Positive = Field(
        default=64, description="Most sequences that the engine batches in one step."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the torch engine computes. auto: CUDA if there is one."
    )
    prefix_cache_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="Most memory of the torch engine for prompt prefixes of ended sequences.",
    )
    image_cache_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Most memory of the torch engine for images that it has read and resized.",
    )
    tensor_model_parallel_size: Positive = Field(
        default=1, description="Devices that one copy of the weights is split over (vllm, sglang)."
    )
    data_parallel_size: Positive = Field(
        default=1, description="Copies of the weights behind this one server (vllm, sglang)."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory for weights and KV cache (vllm, sglang). "
        "Unset: the engine's own choice.",
    )
    kv_cache_bytes: Positive | None = Field(
        default=None,
        description="Memory for the KV cache where there is no GPU (vllm, sglang). "
        "Unset: the engine's own choice.",
    )
    max_num_batched_tokens: Positive | None = Field(
        default=None,
        description="Most tokens, prompts' included, that one step reads (vllm, sglang). "
        "Unset: the engine's own choice.",
    )
    enforce_eager: bool = Field(
        default=False, description="Compile and capture nothing; the torch engine never does."
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Keep what was computed for a prompt for prompts that begin alike.",
    )


class FakeConfig(_Model):
    """The fake engine: its vocabulary and its latency. Only for engine=fake."""

    vocab_size: Positive = Field(
        default=256, description="Token ids are below it. Ignored with a model."
    )
    eos_token_id: int = Field(
        default=0, ge=0, description="Ends a completion. Ignored with a model."
    )
    weights_seed: int = Field(default=0, ge=0, description="Picks the weights of version 0.")
    prefill_s_per_token: float = Field(
        default=0.0, ge=0, description="Seconds per prompt token that is not cached."
    )
    decode_s_per_token: float = Field(default=0.0, ge=0, description="Seconds per sampled token.")


class AdmissionConfig(_Model):
    """How much work the server takes on."""

    max_in_flight: Positive = Field(
        default=256, description="Most completions handed to the engine."
    )
    max_queued: int = Field(
        default=1024, ge=0, description="Most completions that wait; more are RESOURCE_EXHAUSTED."
    )


class CoalesceConfig(_Model):
    """How sampled tokens are grouped into messages."""

    max_tokens: int = Field(default=32, ge=1, le=1024, description="Send when so many tokens wait.")
    max_wait_s: float = Field(
        default=0.5,
        ge=0,
        description="Send when the oldest waits so long. A completion's first tokens and its end "
        "never wait; a short wait makes every token a message, which costs more than ten tokens.",
    )


class WeightsConfig(_Model):
    """How new weights come in."""

    directory: Path | None = Field(
        default=None, description="File transport reads only below it. Unset: no file transport."
    )
    max_chunk_bytes: int = Field(
        default=2 << 20, ge=1 << 10, le=4_000_000, description="Largest chunk taken by PushWeights."
    )
    max_lease_s: float = Field(
        default=3600.0, gt=0, description="Longest lease that an update may ask."
    )


class SecurityConfig(_Model):
    """Transport security; required beyond loopback."""

    tls_certificate: Path | None = Field(default=None, description="PEM chain of the server.")
    tls_key: Path | None = Field(default=None, description="PEM private key of the server.")
    token_file: Path | None = Field(
        default=None, description="File with the bearer token that every call must carry."
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: give both or neither")
        return self


class ServerConfig(_Model):
    """Everything that `python -m treadle.rollout_server` can be told."""

    engine: str = Field(
        default="fake",
        description="fake, torch, vllm, sglang, or module:factory of your own.",
    )
    engine_args: dict[str, JsonValue] = Field(
        default={},
        description="Arguments of the engine's own that no key here sets, by their names there "
        "(vllm: AsyncEngineArgs, sglang: ServerArgs).",
    )
    address: str = Field(
        default="127.0.0.1:0", description="host:port to listen on; port 0 picks one."
    )
    insecure_allow_plaintext_beyond_loopback: bool = Field(
        default=False,
        description="Listen beyond loopback without TLS and token. Anyone can then use it.",
    )
    ready_file: Path | None = Field(
        default=None, description='Written when serving: {"address": "host:port", "pid": n}.'
    )
    parent_pid: Positive | None = Field(
        default=None, description="Shut down when this process is gone."
    )
    max_request_bytes: int = Field(
        default=64 << 20,
        ge=4 << 20,
        le=(1 << 31) - 1,
        description="Largest request message; a prompt travels with its images. Clients learn it.",
    )
    shutdown_grace_s: float = Field(
        default=10.0,
        ge=0,
        description="How long completions in flight may take to end at shutdown.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severe level that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="A line of text, or one JSON object a line."
    )
    metrics_address: str | None = Field(
        default=None,
        description="host:port of /metrics for Prometheus; port 0 picks one. Unset: no metrics.",
    )
    model: ModelConfig = ModelConfig()
    fake: FakeConfig = FakeConfig()
    admission: AdmissionConfig = AdmissionConfig()
    coalesce: CoalesceConfig = CoalesceConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _addresses_are_safe(self) -> Self:
        for key in ("address", "metrics_address"):
            text = getattr(self, key)
            if text is None:
                continue
            try:
                address = Address.parse(text)
            except ValueError as error:
                raise ValueError(f"{key} {error}") from None
            if not address.on_loopback and not self.insecure_allow_plaintext_beyond_loopback:
                self._check_security(key, text)
        return self

    def _check_security(self, key: str, address: str) -> None:
        missing = [
            name
            for name in ("tls_certificate", "tls_key", "token_file")
            if getattr(self.security, name) is None
        ]
        if missing:
            raise ValueError(
                f"{key} {address!r} is reachable from other machines and "
                f"{', '.join('security.' + name for name in missing)} is not set: set it, listen "
                "on 127.0.0.1, or pass --insecure_allow_plaintext_beyond_loopback true"
            )
