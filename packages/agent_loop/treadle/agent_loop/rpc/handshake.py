"""The handshake: checks what a client requires of its servers, before the first token.

Invariant: whatever would fail or silently go wrong later (another tokenizer, a smaller vocabulary,
no log-probabilities) is refused at start, with the server's address and both values. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treadle.agent_loop.errors import ImageRejectedError, SetupError

IMAGES = "images"
"""The capability that prompts with images require."""

ROUTED_EXPERTS = "routed_experts"
"""The capability that `Services.routed_experts` requires."""

CONSTRAINED_SAMPLING = "constrained_sampling"
"""The capability that `SamplingParams.constraint` requires."""
GENERATE_MANY = "generate_many"
"""The capability of servers that sample many completions over one call."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""The capability that `RequestContext.prompt_logprobs_from` requires."""

SAMPLING_MASK = "sampling_mask"
"""The capability that `SamplingParams.sampling_mask` requires."""

_FIXES = {
    SAMPLING_MASK: ". Training with top_p, top_k or min_p needs it: sample with top_p 1, no top_k "
    "and min_p 0, or start a server of a release that has it"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server's answer at the handshake.

    Attributes:
        server_version: Version of the server's package.
        engine: "fake", "torch", "sglang" or "vllm".
        capabilities: Names of the fields of `Capabilities` that are true.
        vocab_size: Number of rows of the model's embedding; every id is below it.
        context_length: Maximum number of prompt and completion tokens.
        tokenizer_sha256: Hash of tokenizer.json; empty if the server has none.
        weight_version: Weight version at the time of the handshake.
        max_in_flight: Maximum number of running requests.
        max_queued: Maximum number of waiting requests.
        max_request_bytes: Maximum size of a request message.
        num_moe_layers: Number of layers with experts; 0, as the two below, without any.
        num_experts: Number of experts of such a layer.
        experts_per_token: Number of experts that it chooses for a row.
    """

    address: str
    server_version: str
    engine: str
    engine_version: str
    capabilities: frozenset[str]
    architecture: str
    vocab_size: int
    context_length: int
    tokenizer_sha256: bytes
    weight_version: int
    max_in_flight: int
    max_queued: int
    max_request_bytes: int
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """The client's requirements of its servers. None means not checked.

    Attributes:
        tokenizer_sha256: Hash of the renderer's tokenizer.json.
        vocab_size: Number of ids in the renderer's vocabulary; the model's embedding may be larger.
        context_length: Number of prompt and response tokens that must fit.
        capabilities: Names of fields of `Capabilities` that must be true.
    """

    tokenizer_sha256: bytes | None = None
    vocab_size: int | None = None
    context_length: int | None = None
    capabilities: frozenset[str] = frozenset({"sampled_logprobs"})


def check(servers: Sequence[ServerInfo], needs: Requirements) -> None:
    """Refuses servers that are incompatible with the client or with one another.

    Raises:
        SetupError: The message lists every incompatibility.
    """
    problems = [problem for server in servers for problem in _unmet(server, needs)]
    for server in servers[1:]:
        problems.extend(_differences(servers[0], server))
    if problems:
        raise SetupError("the rollout servers do not fit:\n  " + "\n  ".join(problems))


def check_images_taken(servers: Sequence[ServerInfo]) -> None:
    """Checks that each of the servers accepts prompts with images.

    Raises:
        ImageRejectedError: The engine of a server does not accept images.
    """
    for server in servers:
        if IMAGES not in server.capabilities:
            raise ImageRejectedError(
                f"{server.address}: engine {server.engine!r} with {server.architecture} takes no "
                f"images; serve a vision-language model, and ask for the capability {IMAGES!r} "
                "at connect to learn it at start"
            )


def _unmet(server: ServerInfo, needs: Requirements) -> list[str]:
    problems = []
    sha = needs.tokenizer_sha256
    if sha is not None and server.tokenizer_sha256 != sha:
        problems.append(
            f"{server.address}: tokenizer.json has sha256 {_hex(server.tokenizer_sha256)}, the "
            f"renderer's has {_hex(sha)}: start the server with the renderer's model directory"
        )
    if needs.vocab_size is not None and server.vocab_size < needs.vocab_size:
        problems.append(
            f"{server.address}: the model's vocabulary has {server.vocab_size} ids, the "
            f"renderer's {needs.vocab_size}"
        )
    if needs.context_length is not None and server.context_length < needs.context_length:
        problems.append(
            f"{server.address}: the context holds {server.context_length} tokens, prompt and "
            f"response need {needs.context_length}: raise model.context_length or lower the limits"
        )
    problems.extend(
        f"{server.address}: engine {server.engine!r} lacks the capability {name!r}; it has "
        f"{', '.join(sorted(server.capabilities)) or 'none'}{_FIXES.get(name, '')}"
        for name in sorted(needs.capabilities - server.capabilities)
    )
    return problems


def _differences(first: ServerInfo, other: ServerInfo) -> list[str]:
    """Returns the differences that replicas of one model must not have."""
    names = ("architecture", "vocab_size", "tokenizer_sha256", "num_moe_layers", "num_experts")
    return [
        f"{other.address}: {name} is {_show(getattr(other, name))}, at {first.address} it is "
        f"{_show(getattr(first, name))}"
        for name in names
        if getattr(first, name) != getattr(other, name)
    ]


def _show(value: object) -> str:
    return _hex(value) if isinstance(value, bytes) else repr(value)


def _hex(digest: bytes) -> str:
    return digest.hex() if digest else "(none)"
