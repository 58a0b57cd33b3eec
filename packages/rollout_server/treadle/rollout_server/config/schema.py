"""The schema of the server's configuration, with all defaults.

Invariant: every `ServerConfig` is valid. Unknown keys, values out of range and combinations that
would expose the server to the network by accident raise an error.

Layers, later ones win: the defaults, ``--config file.yaml``, the command line. Environment
variables are not read.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from treadle.rollout_server.address import Address

Positive = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ServedModelConfig(_Model):
    """The model that the engine loads."""

    path: Path | None = Field(
        default=None,
        description="Hugging Face directory: config.json, *.safetensors, tokenizer.json; a run "
        "directory of the trainer; or ORG/NAME on the Hugging Face Hub.",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="Element type of the weights in the engine."
    )
    context_length: Positive | None = Field(
        default=None,
        description="Maximum number of tokens of prompt plus completion. "
        "Unset: the model's own maximum.",
    )
    num_threads: Positive | None = Field(
        default=None,
        description="Number of CPU threads of the engine. Unset: the library's default.",
    )
    max_num_seqs: Positive = Field(
        default=64, description="Maximum number of sequences in one step of the engine."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Device of the torch engine. auto: CUDA if available."
    )
    prefix_cache_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="Maximum memory of the torch engine for prefixes of ended sequences.",
    )
    max_draft_tokens: int = Field(
        default=0,
        ge=0,
        le=32,
        description="Maximum number of tokens that the torch engine drafts per sequence in a pass, "
        "out of texts that it has seen; output is that without drafts in float32 on a CPU, and up "
        "to rounding elsewhere. 0: none.",
    )
    batch_invariant: bool = Field(
        default=False,
        description="The torch engine gives a token the same bits whatever else it computes, in "
        "float32 on a CPU with MKL; not for models with experts. On with drafts where it can be.",
    )
    image_cache_bytes: int = Field(
        default=256 << 20,
        ge=0,
        description="Maximum memory for decoded images (torch, vllm, sglang).",
    )
    tensor_model_parallel_size: Positive = Field(
        default=1, description="Number of devices per copy of the weights (vllm, sglang)."
    )
    data_parallel_size: Positive = Field(
        default=1, description="Number of copies of the weights in this server (vllm, sglang)."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Fraction of GPU memory for weights and KV cache (vllm, sglang). "
        "Unset: the engine's default.",
    )
    kv_cache_bytes: Positive | None = Field(
        default=None,
        description="Memory for the KV cache on the CPU (vllm, sglang). "
        "Unset: the engine's default.",
    )
    max_num_batched_tokens: Positive | None = Field(
        default=None,
        description="Maximum number of tokens in one step, including prompts (vllm, sglang). "
        "Unset: the engine's default.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="Disable compilation and CUDA graphs; the torch engine never uses them.",
    )
    enable_prefix_caching: bool = Field(
        default=True,
        description="Reuse keys and values of a prompt for prompts with the same prefix.",
    )


class FakeConfig(_Model):
    """The fake engine: its vocabulary and its latency. Only for engine=fake."""

    vocab_size: Positive = Field(
        default=256, description="Number of token ids. Ignored with a model."
    )
    eos_token_id: int = Field(
        default=0, ge=0, description="Token id that ends a completion. Ignored with a model."
    )
    weights_seed: int = Field(default=0, ge=0, description="Seed of the weights of version 0.")
    prefill_s_per_token: float = Field(
        default=0.0, ge=0, description="Seconds per prompt token that is not cached."
    )
    decode_s_per_token: float = Field(default=0.0, ge=0, description="Seconds per sampled token.")


class AdmissionConfig(_Model):
    """How many completions the server admits."""

    max_in_flight: Positive = Field(
        default=256, description="Maximum number of completions in the engine."
    )
    max_queued: int = Field(
        default=1024,
        ge=0,
        description="Maximum number of waiting completions; more get RESOURCE_EXHAUSTED.",
    )


class CoalesceConfig(_Model):
    """How sampled tokens are grouped into messages."""

    max_tokens: int = Field(
        default=32, ge=1, le=1024, description="Send when this many tokens wait."
    )
    max_wait_s: float = Field(
        default=0.5,
        ge=0,
        description="Send when the oldest token has waited this long. The first tokens of a "
        "completion and its end are never delayed; with a short wait every token is a message, "
        "which costs more than ten tokens.",
    )


class WeightsConfig(_Model):
    """How the server receives new weights."""

    directory: Path | None = Field(
        default=None,
        description="The file transport reads only below it. Unset: no file transport.",
    )
    max_chunk_bytes: int = Field(
        default=2 << 20,
        ge=1 << 10,
        le=4_000_000,
        description="Maximum size of a chunk in PushWeights.",
    )
    max_lease_s: float = Field(default=3600.0, gt=0, description="Maximum lease of an update.")
    allow_plaintext_group: bool = Field(
        default=False,
        description="Take part in collective groups beyond loopback, which have no TLS.",
    )


class SecurityConfig(_Model):
    """Transport security; required on any address but loopback."""

    tls_certificate: Path | None = Field(
        default=None, description="PEM certificate chain of the server."
    )
    tls_key: Path | None = Field(default=None, description="PEM private key of the server.")
    token_file: Path | None = Field(
        default=None, description="File with the bearer token that every call must have."
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                "tls_certificate and tls_key must be set together: set both or neither"
            )
        return self


class ServerTracingConfig(_Model):
    """Where the spans of calls go whose callers record their traces."""

    jsonl: Path | None = Field(
        default=None, description="File to append spans to, one JSON object per line."
    )
    otlp: str | None = Field(
        default=None,
        description="OpenTelemetry endpoint, as http://localhost:4318 (needs "
        "treadle-tracing[otlp]).",
    )


class ServerConfig(_Model):
    """The configuration of `python -m treadle.rollout_server`."""

    engine: str = Field(
        default="fake",
        description="fake, torch, vllm, sglang, or your own module:factory.",
    )
    engine_args: dict[str, JsonValue] = Field(
        default={},
        description="Arguments of the engine's library that no key sets, by their names there "
        "(vllm: AsyncEngineArgs, sglang: ServerArgs).",
    )
    address: str = Field(
        default="127.0.0.1:0", description="host:port to listen on; port 0 picks one."
    )
    insecure_allow_plaintext_beyond_loopback: bool = Field(
        default=False,
        description="Listen beyond loopback without TLS and token; anyone can then use it.",
    )
    ready_file: Path | None = Field(
        default=None, description='File written once serving: {"address": "host:port", "pid": n}.'
    )
    parent_pid: Positive | None = Field(
        default=None, description="Shut down when this process ends."
    )
    max_request_bytes: int = Field(
        default=64 << 20,
        ge=4 << 20,
        le=(1 << 31) - 1,
        description="Maximum size of a request, including images; the handshake tells clients.",
    )
    shutdown_grace_s: float = Field(
        default=10.0,
        ge=0,
        description="Maximum time for in-flight completions to end at shutdown.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Minimum level of logged messages."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines as text, or as one JSON object per line."
    )
    metrics_address: str | None = Field(
        default=None,
        description="host:port of /metrics for Prometheus; port 0 picks one. Unset: no metrics.",
    )
    model: ServedModelConfig = ServedModelConfig()
    fake: FakeConfig = FakeConfig()
    admission: AdmissionConfig = AdmissionConfig()
    coalesce: CoalesceConfig = CoalesceConfig()
    weights: WeightsConfig = WeightsConfig()
    security: SecurityConfig = SecurityConfig()
    tracing: ServerTracingConfig = ServerTracingConfig()

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
