"""The values that cross the package's borders: messages, sampling parameters, completions, tasks.

Invariant: every value is frozen and validated when it is made. It holds no tensor, no socket and
no text other than what was sampled or given. Token ids are plain ints; log-probabilities are in
nats. Nothing here waits.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias

Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""The author of a message."""

_ROLES = ("system", "user", "assistant", "tool")
_IMAGE_TYPES = ("image/png", "image/jpeg", "image/webp")

IMAGE_MARK: Final = "<image>"
"""Marks the position of an image in a message that has images; plain text in other messages."""


class StopReason(enum.StrEnum):
    """Why a trajectory ended. Listed in the order in which `tool_agent` checks them."""

    FINISHED = "finished"
    """The model ended its turn without a tool call, and no interaction continued."""
    RESPONSE_LENGTH = "response_length"
    """Sampled and observed tokens together reached `LoopLimits.max_response_tokens`."""
    CONTEXT_LENGTH = "context_length"
    """Prompt and response together reached `LoopLimits.max_context_tokens`."""
    TURN_LENGTH = "turn_length"
    """The last completion reached its `SamplingParams.max_tokens`, so its turn is open."""
    ASSISTANT_TURNS = "assistant_turns"
    """`LoopLimits.max_assistant_turns` completions were sampled."""
    USER_TURNS = "user_turns"
    """The model got `LoopLimits.max_user_turns` answers, from tools or an interaction."""
    TOOL_STOP = "tool_stop"
    """A tool returned `ToolResult.stop`."""
    AGENT_FAILED = "agent_failed"
    """The user's own agent ended with an error; the tokens sampled before are complete."""
    ERROR = "error"
    """The attempt failed; `Trajectory.error` names the cause. Never train on it."""


class FinishReason(enum.StrEnum):
    """Why one completion ended."""

    STOP = "stop"
    """The end-of-sequence id or a stop id was sampled; it is the completion's last id."""
    LENGTH = "length"
    """`SamplingParams.max_tokens` or the model's context was used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An encoded image.

    Attributes:
        data: The bytes of its file; not decoded here.

    Raises:
        ValueError: The data is empty, or the type is another one.
    """

    data: bytes = field(repr=False)
    mime: str

    def __post_init__(self) -> None:
        if self.mime.startswith("video/"):
            raise ValueError(f"mime is {self.mime!r}; video is not supported: give single frames")
        accepted = ", ".join(_IMAGE_TYPES)
        _require("mime", self.mime, self.mime in _IMAGE_TYPES, f"one of {accepted}")
        if not self.data:
            raise ValueError(f"an {self.mime} image has no bytes")


def check_image_marks(content: str, images: Sequence[Image]) -> None:
    """Checks that the text has one `IMAGE_MARK` per image, or none.

    Raises:
        ValueError: There are images, and the number of marks is neither 0 nor theirs.
    """
    marks = content.count(IMAGE_MARK) if images else 0
    if marks not in (0, len(images)):
        raise ValueError(
            f"the text has {marks} {IMAGE_MARK} marks for {len(images)} images; write one for "
            "each image, or none, which puts the images before the text"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of the model.

    Attributes:
        id: Unique within the turn; the answer refers to it (`Message.tool_call_id`).
        name: The tool's name as the model wrote it; it may not exist.
    """

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message.

    Attributes:
        role: system, user, assistant or tool.
        content: The text. Empty if an assistant message only calls tools.
        tool_call_id: Only on tool messages: the call that the message answers.
        name: Only on tool messages: the tool that answered.
        reasoning: Only on assistant messages: the text that the parser separated as reasoning.
            None means that the parser does not separate reasoning, "" that there was none.
        images: In the order of the `IMAGE_MARK`s in the content; without marks they come before
            the text. Not on assistant messages, because a model samples no images.

    Raises:
        ValueError: A field is set that this role cannot have, or the number of marks is wrong.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in _ROLES:
            raise ValueError(f"role is {self.role!r}; it must be one of {', '.join(_ROLES)}")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a {self.role} message cannot carry tool calls")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError(f"a {self.role} message cannot answer a tool call")
        if self.images and self.role == "assistant":
            raise ValueError("an assistant message cannot carry images")
        check_image_marks(self.content, self.images)

    @property
    def parts(self) -> tuple[str | Image, ...]:
        """The content as non-empty strings and images, in order."""
        if not self.images:
            return (self.content,) if self.content else ()
        texts = self.content.split(IMAGE_MARK)
        if len(texts) == 1:
            return (*self.images, *(text for text in texts if text))
        parts: list[str | Image] = [texts[0]]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts.extend((image, text))
        return tuple(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """The description of a tool for the model.

    Attributes:
        name: Unique among the trajectory's calls.
        parameters: JSON Schema of the arguments object.
    """

    name: str
    description: str
    parameters: Mapping[str, object] = field(
        default_factory=lambda: {"type": "object", "properties": {}, "required": []}
    )

    def as_schema(self) -> dict[str, object]:
        """Returns the OpenAI function schema, which chat templates and `tool_schema` use."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonConstraint:
    """Samples only texts that are JSON of a schema.

    The log-probabilities are those of the constrained distribution, which the policy alone does not
    reproduce: tokens that are sampled so are never trained on.

    Attributes:
        schema: JSON Schema, as JSON. "{}" is any value.
    """

    schema: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """One kind of tagged part of a text: `begin`, JSON of the schema, `end`.

    Attributes:
        end: Text that is never empty.
    """

    begin: str
    schema: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TagConstraint:
    """Samples any text, except that where the trigger stands one of the tags follows, whole.

    The log-probabilities are as those of `JsonConstraint`.

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
class SamplingParams:
    """How one completion is sampled. None leaves the choice to the server.

    Attributes:
        max_tokens: Maximum number of tokens to sample; at least 1.
        temperature: A temperature of 0 is greedy.
        top_p: A number in (0, 1].
        top_k: At least 1. None means the whole vocabulary.
        min_p: A number in [0, 1].
        repetition_penalty: Above 0; 1 means no penalty.
        seed: Seed of this completion. Loops derive one per turn, see `Conversation`.
        stop_token_ids: Sampling one ends the completion; the id stays in the output.
        ignore_eos: Continue past the model's end-of-sequence id.
        constraint: A constraint of the text; for servers with `constrained_sampling`.
        sampling_mask: Whether `TokenChunk.sampling_masks` are wanted, for a policy that trains on
            what truncation left; for servers with `sampling_mask`.

    Raises:
        ValueError: A value is outside its range.
    """

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    constraint: JsonConstraint | TagConstraint | None = None
    sampling_mask: bool = False

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        if self.temperature is not None:
            _require("temperature", self.temperature, self.temperature >= 0, "at least 0")
        if self.top_p is not None:
            _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        if self.top_k is not None:
            _require("top_k", self.top_k, self.top_k >= 1, "at least 1, or None for all")
        if self.min_p is not None:
            _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        if self.repetition_penalty is not None:
            positive = self.repetition_penalty > 0
            _require("repetition_penalty", self.repetition_penalty, positive, "above 0")
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed < 2**64, "in [0, 2**64)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Consecutive sampled tokens of one weight version.

    Attributes:
        token_ids: Array of shape [C], C at least 1.
        logprobs: [C], nats, under the distribution that each id was drawn from.
        weight_version: Version of the weights that sampled them.
        sampling_masks: [C], the ids that could have been drawn in the place of each, encoded as in
            the contract; empty if they were not requested.

    Raises:
        ValueError: The lengths differ, or there is no token.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_version: int
    sampling_masks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("token_ids is empty; a chunk must have at least one token")
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"a chunk of {len(self.token_ids)} tokens has {len(self.logprobs)} logprobs"
            )
        if self.sampling_masks and len(self.token_ids) != len(self.sampling_masks):
            raise ValueError(
                f"a chunk of {len(self.token_ids)} tokens has {len(self.sampling_masks)} "
                "sampling masks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts that a model chose for consecutive rows of a sequence.

    A row is what the model computes at one position. That of a completion's last token is computed
    with the next prompt.

    Attributes:
        first: Position of the first row in the sequence.
        num_layers: Number of layers with experts.
        top_k: Number of experts that a layer chooses for a row.
        id_bytes: Number of bytes of an id, 1 or 2.
        data: Ids, [rows, num_layers, top_k], row-major, little-endian.

    Raises:
        ValueError: The data is not a whole number of rows.
    """

    first: int
    num_layers: int
    top_k: int
    id_bytes: int
    data: bytes = field(repr=False)

    def __post_init__(self) -> None:
        size = len(self.data)
        _require("the size of data", size, size % self.row_bytes == 0, f"n * {self.row_bytes}")

    @property
    def row_bytes(self) -> int:
        """Number of bytes of one row."""
        return self.num_layers * self.top_k * self.id_bytes

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.first + len(self.data) // self.row_bytes

    def until(self, position: int) -> "RoutedExperts":
        """Returns the rows before a position."""
        size = max(0, position - self.first) * self.row_bytes
        return self if size >= len(self.data) else replace(self, data=self.data[:size])

    def followed_by(self, parts: "Sequence[RoutedExperts]") -> "RoutedExperts":
        """Returns these rows and those of parts that continue them.

        Raises:
            ValueError: A part begins elsewhere, or has another shape.
        """
        stop = self.stop
        for part in parts:
            if part.first != stop:
                raise ValueError(
                    f"experts of rows from {part.first} on do not continue those before {stop}"
                )
            stop = part.stop
        shapes = {(p.num_layers, p.top_k, p.id_bytes) for p in (self, *parts)}
        if len(shapes) > 1:
            raise ValueError(f"experts of one sequence have several shapes: {sorted(shapes)}")
        return replace(self, data=b"".join(part.data for part in (self, *parts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one `TokenGenerator.generate`.

    Attributes:
        chunks: In order; new weights start a new chunk. Empty if nothing was sampled.
        cached_prompt_tokens: Number of prompt tokens that the server did not have to compute.
        queue_s: Seconds from arrival at the server to the first step.
        num_interruptions: Number of times that a server interrupted it, for example for new
            weights, before it was resumed.
        routed_experts: Experts of the rows from `RequestContext.routed_experts_from` on; None if
            they were not requested.
        prompt_logprobs: In nats, of the ids from `RequestContext.prompt_logprobs_from` to the end
            of the prompt, at temperature 1; empty if they were not requested.
    """

    chunks: tuple[TokenChunk, ...]
    finish: FinishReason
    cached_prompt_tokens: int = 0
    queue_s: float = 0.0
    engine_s: float = 0.0
    num_interruptions: int = 0
    routed_experts: RoutedExperts | None = None
    prompt_logprobs: tuple[float, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """[N] sampled ids over all chunks."""
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of sampled tokens over all chunks."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """One attempt of one row.

    Attributes:
        task_id: Identifies the row; the n attempts of one row share it.
        sample_index: The row's index in the data set.
        rollout_index: Which of the row's attempts this is, from 0.
        loop: Name of the agent loop in the `LoopRegistry`.
        messages: The conversation so far; at least one.
        fields: The row's other columns (`reward_model`, `extra_info`, `data_source`, ...).
        seed: Makes the attempt repeatable: every completion's seed is derived from it.
            None: the seed of `Services.sampling`, which is mixed with the task's name.
    """

    task_id: str
    sample_index: int
    rollout_index: int
    loop: str
    messages: tuple[Message, ...]
    fields: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError(f"task {self.task_id!r} has no message")


def _require(name: str, value: object, ok: bool, accepted: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value!r}; it must be {accepted}")
