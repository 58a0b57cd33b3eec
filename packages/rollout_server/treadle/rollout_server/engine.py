"""The engine: turns token prompts into sampled tokens, and holds the weights.

Invariant: an engine does not handle gRPC, queues, leases or future versions. It samples the
requests it receives, ends every sequence exactly once, and changes weights only between
`pause` and `resume`: all of them or none, unless they are loaded in place.

Lifecycle: a factory from `registry.py` builds it, `generate` runs many sequences at once,
`aclose` ends those that still run. Each call happens on the server's event loop and must
not block it: an engine with heavy work owns a thread.

Who waits: the consumer of `generate` waits for events and nothing waits for the consumer,
so an engine may run ahead of a slow reader by at most one completion. `pause` waits for
the sequences that its policy names, whose consumers must continue to read. Closing the
generator (or cancelling the task that reads it) wakes the engine, which frees the
sequence's slot and cache. `wait_failed` reports an engine that breaks between two calls.

In order: the protocol, then the values that pass through it: what an engine is, what it
samples, how it pauses, and how its weights arrive.

This module imports neither torch nor protobuf: it is the seam between both.
"""

import enum
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Engine(Protocol):
    """An engine, as a rollout server needs it.

    The docstring of this module has the invariants; `treadle.conformance.contracts` tests them.
    """

    @property
    def info(self) -> "EngineInfo":
        """The description of this engine."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled from; 0 before any update."""

    @property
    def counters(self) -> "EngineCounters":
        """Number of sequences so far, by outcome; a waiting sequence is not yet started."""

    def generate(self, request: "EngineRequest") -> AsyncGenerator["EngineEvent", None]:
        """Yields one `Started`, `PromptLogprobs` if wanted, then `Tokens`, then one `Finished`.

        A sequence that arrives while the engine is paused waits for `resume`. Closing the
        generator before `Finished` aborts the sequence.

        Raises:
            ImageUnreadable: An image cannot be decoded; raised before `Started`.
            InvalidField: The engine does not support the constraint; raised before `Started`.
            PlaceholderMismatch: The prompt has another number of placeholder ids than the model
                makes of the image; raised before `Started`.
            Exception: Any other means that the engine is broken; the server stops serving.
        """

    async def pause(self, policy: "InFlightPolicy") -> None:
        """Returns when no sequence runs (or, for CONTINUE, when all are suspended).

        From then on nothing is sampled until `resume`. Pausing again is allowed and may
        name another policy: INTERRUPT ends and DRAIN finishes what CONTINUE had kept. A
        cancelled pause is undone with `resume`.
        """

    async def resume(self) -> None:
        """Continues sampling. Does nothing when not paused."""

    async def load_weights(
        self, tensors: AsyncIterator["NamedTensor"], *, version: int, in_place: bool = False
    ) -> None:
        """Replaces all weights and sets their version.

        Called only while paused, perhaps without the KV cache. Afterwards nothing computed
        from the old weights serves a new sequence (prefix caches are dropped); sequences kept
        by CONTINUE may continue with what they hold.

        Args:
            tensors: All of them, in any order.
            version: Version of the new weights.
            in_place: False: it replaces all or, when it raises, none. True: each tensor
                replaces the engine's as it arrives, and no second copy is held; when that
                raises or is cancelled the engine holds a mixture, until a later load succeeds.
                Each tensor may arrive in parts, in order, where the engine can `split_tensors`.

        Raises:
            TensorMismatch: A tensor is missing, unknown, duplicated, or has the wrong shape.
            EngineFailed: Not in place, and neither the old nor the new weights are whole.
        """

    async def receive_weights(
        self, group: "CollectiveGroup", tensors: Sequence["TensorSpec"], *, version: int
    ) -> None:
        """Replaces all weights in place by what the senders of a group broadcast.

        Called only where `EngineCapabilities.collective`; else as `load_weights`.

        Raises:
            Exception: The group could not be joined or broke; the weights are a mixture.
        """

    async def release_memory(self, kinds: "frozenset[MemoryKind]") -> None:
        """Releases device memory of these kinds; weights stay in host memory.

        Called only while paused with nothing in flight. Kinds already released stay released.
        """

    async def restore_memory(self, kinds: "frozenset[MemoryKind]") -> None:
        """Takes device memory back; the weights are those from before."""

    async def wait_failed(self) -> Exception:
        """Returns the cause when the engine breaks, during a call or not; else never returns."""

    async def aclose(self) -> None:
        """Ends all sequences, as INTERRUPTED, and frees everything. Idempotent."""


# What an engine is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The features of an engine beyond plain sampling; one bool each."""

    sampled_logprobs: bool = False
    priority: bool = False
    in_flight_continue: bool = False
    release_memory: bool = False
    images: bool = False
    collective: bool = False
    split_tensors: bool = False
    routed_experts: bool = False
    prompt_logprobs: bool = False
    constrained_sampling: bool = False
    sampling_mask: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model that an engine holds.

    Attributes:
        vocab_size: Rows of the embedding; every token id is below it.
        context_length: Prompt plus completion, in tokens.
        eos_token_ids: Sampling one ends a completion unless `Sampling.ignore_eos`.
        tokenizer_sha256: 32 bytes, of ``tokenizer.json``; empty when there is none.
        num_moe_layers: Number of layers with experts; 0, as the two below, without any.
        num_experts: Per layer, without those that every token uses.
        experts_per_token: Number of experts that a layer chooses for each row.
    """

    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int] = frozenset()
    tokenizer_sha256: bytes = b""
    num_moe_layers: int = 0
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def expert_id_bytes(self) -> int:
        """Number of bytes of an expert id in `Tokens.routed_experts`."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def routed_row_bytes(self) -> int:
        """Number of bytes of one row in `Tokens.routed_experts`."""
        return self.num_moe_layers * self.experts_per_token * self.expert_id_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The description of an engine; fixed for its life.

    Attributes:
        name: Its name in the registry.
        version: Version of the library that does the work.
        parameters: The tensors that `Engine.load_weights` must be given: every name once, in these
            shapes. The element type is the one held; another one is converted. None: the engine
            takes whatever it is given, which only the fake does.
        num_workers: Number of ranks that it brings to a collective group.
    """

    name: str
    version: str
    capabilities: EngineCapabilities
    model: ModelInfo
    parameters: "tuple[TensorSpec, ...] | None" = None
    num_workers: int = 1


# What it samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. The defaults are the server's: plain sampling from the model.

    Checked before an engine sees it, see `services/codec.py`. The filters apply in this
    order, each to what the one before left: penalty, temperature, top_k, top_p, min_p.

    Attributes:
        max_tokens: At least 1; prompt plus `max_tokens` fits the context.
        temperature: 0 is greedy: the most likely id, the smallest among equals.
        top_p: A number in (0, 1].
        top_k: At least 1; None keeps the whole vocabulary.
        min_p: In [0, 1]: ids less likely than `min_p` times the likeliest are dropped.
        repetition_penalty: Above 0; divides positive logits of ids that occurred in the
            prompt or the completion and multiplies negative ones (CTRL, arXiv 1909.05858).
        seed: The same seed, prompt and weights give the same tokens whatever else runs.
            The draw of a token depends on the seed and the token's position in prompt plus
            completion, so a retry with the tokens that arrived continues as the first
            attempt would have. None draws from the engine's own randomness.
        stop_token_ids: End the completion like end of sequence; the id is its last token.
        ignore_eos: Whether to continue past the model's own end-of-sequence ids.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class ConstraintForm(enum.Enum):
    """The ways to describe the texts that a completion may have."""

    JSON_SCHEMA = "json_schema"
    """A JSON Schema, as JSON."""
    REGEX = "regex"
    """A regular expression that the whole text matches."""
    GRAMMAR = "grammar"
    """A context-free grammar in EBNF whose start symbol is `root`."""
    CHOICES = "choices"
    """Texts to choose from."""
    TAGGED = "tagged"
    """Text with tagged parts; see `TaggedText`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """One kind of tagged part: `begin`, JSON of the schema, `end`.

    Attributes:
        json_schema: A JSON Schema, as JSON.
        end: Text that is never empty.
    """

    begin: str
    json_schema: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedText:
    """Any text, except that where the trigger stands one of the tags follows, whole.

    Attributes:
        tags: There is at least one, never none.
        trigger: The beginning of each tag; not empty.
        required: Whether the text begins with a tag; else there may be none.
        single: Whether the text ends with its first tag; else text and tags may follow.
    """

    tags: tuple[Tag, ...]
    trigger: str
    required: bool = False
    single: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A form that the text of a completion must have.

    At each position, ids that no such text continues with are left out before temperature and
    truncation, so `Tokens.logprobs` are those of the constrained distribution. An id that ends the
    completion is drawn only where the text is complete.

    Attributes:
        form: Form of the description in `texts`.
        texts: The choices, at least one; of TAGGED, none; else the one description.
        tagged: The description of TAGGED; else None.
    """

    form: ConstraintForm
    texts: tuple[str, ...] = ()
    tagged: TaggedText | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptImage:
    """One image of a prompt.

    Attributes:
        data: The bytes of its file.
        media_type: image/png, image/jpeg or image/webp; `data` begins like one.
        start: Index of its first placeholder id in the prompt.
        num_tokens: Number of consecutive placeholder ids there, at least one. The engine
            checks that it fits the image.
    """

    data: bytes
    media_type: str
    start: int
    num_tokens: int

    @property
    def stop(self) -> int:
        """Index after its last placeholder id."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to run.

    Attributes:
        request_id: Names it in logs; unique per attempt.
        prompt: ``[P]`` ids, at least one.
        session_id: The same for all turns of a trajectory; "" for none.
        priority: A request with a larger one runs earlier.
        images: In prompt order; they lie within the prompt and do not overlap.
        routed_experts_from: First position whose experts are wanted, at most ``P``; None: of none.
        prompt_logprobs_from: First id of the prompt whose log-probability is wanted, 1 to ``P``;
            None: of none.
        constraint: A constraint of its text; None: any text.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    session_id: str = ""
    logprobs: bool = False
    priority: int = 0
    images: tuple[PromptImage, ...] = ()
    routed_experts_from: int | None = None
    prompt_logprobs_from: int | None = None
    constraint: Constraint | None = None
    sampling_mask: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """First event: the sequence has a slot and its prompt is being read.

    Attributes:
        cached_prompt_tokens: Number of tokens of the prompt that need not be computed.
        since_s: Seconds from the sequence's start to this event; 0 if it comes at once.
    """

    cached_prompt_tokens: int
    since_s: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of ids of the prompt; comes before the first `Tokens`, perhaps in parts.

    They are nats, each of an id given the ids before it, under the model's distribution at
    temperature 1; no field of `Sampling` changes them. The first one is of the id at
    `EngineRequest.prompt_logprobs_from`, and parts follow one another. Only a sequence that is
    interrupted before its first token may lack some.
    """

    logprobs: tuple[float, ...]
    weight_version: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """At least one sampled token, all from one weight version.

    `logprobs` has one value per id, in nats under the distribution drawn from, after penalty,
    temperature and truncation; empty unless requested. At temperature 0 that distribution is one
    point and they are 0.0.

    `routed_experts` are expert ids, ``[rows, num_moe_layers, experts_per_token]``, little-endian,
    of the rows that follow those of earlier events, the first one being
    `EngineRequest.routed_experts_from`. No row lies after the one that predicts the last token so
    far, and before `Finished` that one has come.

    `sampling_masks` are the ids that could have been drawn in the place of each token, as
    `sampling_mask.py` encodes them; empty unless requested.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    routed_experts: bytes = b""
    sampling_masks: tuple[bytes, ...] = ()


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"  # End of sequence or a stop id, which is the last token.
    LENGTH = "length"  # `max_tokens` reached.
    INTERRUPTED = "interrupted"  # Cut by a pause; the tokens so far are good.


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event.

    Attributes:
        prefill_s: Seconds from the start to the first token; None: its event came at once.
    """

    reason: FinishReason
    prefill_s: float | None = field(default=None, compare=False)


EngineEvent = Started | PromptLogprobs | Tokens | Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """Number of sequences by outcome, since the engine was built.

    ``started == finished + aborted + running`` at every instant.

    Attributes:
        passes: Number of times that a sequence was sampled from; several tokens come of one pass
            where drafts are accepted. 0 if the engine does not count them.
        drafted: Number of tokens that were drafted for speculative decoding.
        accepted: Number of drafted tokens that were sampled.
    """

    started: int = 0
    finished: int = 0
    aborted: int = 0
    running: int = 0
    passes: int = field(default=0, compare=False)
    drafted: int = field(default=0, compare=False)
    accepted: int = field(default=0, compare=False)


# How it pauses


class InFlightPolicy(enum.Enum):
    """What to do with in-flight sequences when the engine pauses."""

    DRAIN = "drain"  # They run to their end; nothing new starts.
    INTERRUPT = "interrupt"  # They end now, as `FinishReason.INTERRUPTED`.
    CONTINUE = "continue"  # They are suspended, and continue at `resume`.


class MemoryKind(enum.Enum):
    """Device memory that an engine can release while it is paused."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


# How its weights arrive


class ElementType(enum.Enum):
    """Type of a tensor's elements; the value is the name as it appears in messages."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8_E4M3FN = "float8_e4m3fn"

    @property
    def size_bytes(self) -> int:
        """Number of bytes per element."""
        return _SIZE_BYTES[self]


_SIZE_BYTES = dict(zip(ElementType, (4, 2, 2, 1), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, type and shape of one tensor."""

    name: str
    element_type: ElementType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the whole tensor."""
        return math.prod(self.shape) * self.element_type.size_bytes

    @property
    def label(self) -> str:
        """Type and shape for messages, such as ``bfloat16[4, 8]``."""
        return f"{self.element_type.value}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlace:
    """Where other processes of this host find bytes that this one holds.

    Attributes:
        path: A memfd as ``/proc/<pid>/fd/<n>``, or another file that can be mapped. It
            exists for as long as the bytes are valid.
        offset: Offset of the first byte.
    """

    path: str
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """One tensor, or a part of one, with its bytes, little-endian and row-major.

    Attributes:
        spec: Name, type and shape of the whole tensor.
        data: All of the tensor, or whole elements of it from byte `offset` on; writable,
            one-dimensional, of format "B". The sender owns it and needs it back unchanged. It is
            valid until the next tensor is requested when loading in place, else until
            `Engine.load_weights` returns.
        place: The same bytes, for workers that are other processes; None: no file has them.
        offset: Offset of `data` in the tensor, in bytes.
    """

    spec: TensorSpec
    data: memoryview
    place: FilePlace | None = None
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """A torch.distributed group through which senders broadcast weights.

    Attributes:
        rendezvous: host:port of a TCPStore, which rank 0 serves.
        group_name: Prefix of the group's keys in the store.
        world_size: Number of ranks in the group, including the senders.
        first_rank: Rank of the engine's first worker; the ranks of its
            `EngineInfo.num_workers` workers are consecutive.
        bucket_bytes: Maximum size of one broadcast, unless a single tensor is larger.
    """

    backend: str
    rendezvous: str
    group_name: str
    world_size: int
    first_rank: int
    bucket_bytes: int
    senders: tuple[int, ...]
