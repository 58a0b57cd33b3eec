"""The errors of a rollout server: one exception per reason that a caller can act on.

Invariant: every error that a caller gets is one of these. Any other exception that leaves the
engine becomes an `EngineFailed`, and one that leaves our own code is a bug.
`services/errors.py` maps each class to its gRPC status and typed detail, and its test
holds that map total over the contract's `ErrorReason`.
"""

from collections.abc import Sequence


class RolloutServerError(Exception):
    """Base of everything here. The message names the cause, the value and the fix."""


class DeadlineRequired(RolloutServerError):
    """A call carried no deadline."""

    def __init__(self, method: str) -> None:
        super().__init__(f"{method} needs a deadline: set a timeout on the call")


class Unauthenticated(RolloutServerError):
    """The bearer token is missing or wrong."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}: send metadata 'authorization: Bearer <token>'")


class InvalidField(RolloutServerError):
    """A request field holds a value that is not accepted."""

    def __init__(self, field: str, received: object, expected: str) -> None:
        super().__init__(f"{field} is {received}, expected {expected}")
        self.field = field
        self.received = str(received)
        self.expected = expected


class PromptTooLong(RolloutServerError):
    """The prompt leaves no room for a token."""

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens and the context holds {context_length}: "
            f"at most {context_length - 1} leave room for a completion"
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class ImageUnreadable(RolloutServerError):
    """The bytes of an image are not an image of their media type, or the image is too large."""

    def __init__(self, image_index: int, media_type: str, problem: str) -> None:
        super().__init__(
            f"images[{image_index}] cannot be read as {media_type}: {problem}; send the bytes of "
            "the file as they are"
        )
        self.image_index = image_index
        self.media_type = media_type
        self.problem = problem


class PlaceholderMismatch(RolloutServerError):
    """The prompt has another number of placeholder ids for an image than the model makes of it."""

    def __init__(
        self, image_index: int, first_placeholder: int, received: int, expected: int
    ) -> None:
        super().__init__(
            f"images[{image_index}] has {received} placeholder ids at {first_placeholder} and the "
            f"model makes {expected} of it: give renderer and server the same image processor "
            "(preprocessor_config.json)"
        )
        self.image_index = image_index
        self.first_placeholder = first_placeholder
        self.received = received
        self.expected = expected


class CapabilityMissing(RolloutServerError):
    """The engine lacks a capability that the call needs."""

    def __init__(self, engine: str, capability: str) -> None:
        super().__init__(
            f"engine {engine!r} lacks {capability!r}: read GetServerInfoResponse.capabilities first"
        )


class Overloaded(RolloutServerError):
    """The queue is full."""

    def __init__(self, in_flight: int, queued: int, retry_after_s: float) -> None:
        super().__init__(
            f"{in_flight} completions in flight and {queued} queued, both at their maximum: "
            f"retry in {retry_after_s:.2f} s or on another replica"
        )
        self.retry_after_s = retry_after_s


class NotServing(RolloutServerError):
    """The server is loading, paused or updating."""

    def __init__(self, state: str, retry_after_s: float) -> None:
        super().__init__(f"the server is {state}: retry in {retry_after_s:.2f} s or elsewhere")
        self.retry_after_s = retry_after_s


class ShuttingDown(RolloutServerError):
    """The server is shutting down."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down: use another replica")


class StateConflict(RolloutServerError):
    """The call does not fit the server's state."""

    def __init__(self, call: str, state: str, fix: str) -> None:
        super().__init__(f"{call} does not fit a server that is {state}: {fix}")


class WeightVersionBehind(RolloutServerError):
    """The serving weights are older than requested, or an update is not newer than they are."""

    def __init__(self, serving: int, wanted: int, fix: str) -> None:
        super().__init__(f"weight version {serving} serves and {wanted} is wanted: {fix}")
        self.serving = serving
        self.wanted = wanted


class UpdateInProgress(RolloutServerError):
    """Another update holds the server."""

    def __init__(self, update_id: str, lease_left_s: float) -> None:
        super().__init__(
            f"update {update_id!r} holds the server for another {lease_left_s:.1f} s: "
            "abort it or wait for its lease"
        )
        self.update_id = update_id
        self.lease_left_s = lease_left_s


class UpdateUnknown(RolloutServerError):
    """The update was never begun, was aborted, or its lease ran out."""

    def __init__(self, update_id: str, cause: str) -> None:
        super().__init__(f"update {update_id!r} {cause}: begin again")
        self.update_id = update_id


class TensorMismatch(RolloutServerError):
    """A tensor is not the one that was announced, or that the engine holds under its name."""

    def __init__(self, name: str, expected: str, received: str) -> None:
        super().__init__(f"tensor {name!r} is {received}, expected {expected}")
        self.name = name
        self.expected = expected
        self.received = received


class ChunkOutOfOrder(RolloutServerError):
    """A chunk does not start where the bytes held so far end."""

    def __init__(self, tensor_index: int, expected_offset: int, received_offset: int) -> None:
        super().__init__(
            f"chunk of tensor {tensor_index} starts at byte {received_offset}: "
            f"resume from {expected_offset}"
        )
        self.tensor_index = tensor_index
        self.expected_offset = expected_offset


class ChunkCorrupt(RolloutServerError):
    """A chunk's bytes do not match its checksum."""

    def __init__(self, tensor_index: int, offset: int, announced: int, computed: int) -> None:
        super().__init__(
            f"chunk of tensor {tensor_index} at byte {offset} has CRC-32 {computed:#010x}, "
            f"announced {announced:#010x}: send it again"
        )


class UpdateIncomplete(RolloutServerError):
    """Commit came before every byte had arrived."""

    def __init__(self, tensor_indices: Sequence[int]) -> None:
        shown = ", ".join(map(str, tensor_indices[:8])) + ("..." if len(tensor_indices) > 8 else "")
        super().__init__(f"{len(tensor_indices)} tensors lack bytes ({shown}): push the rest")
        self.tensor_indices = tuple(tensor_indices)


class DeltaBaseMismatch(RolloutServerError):
    """A delta is based on weights that the server does not hold, or whose copy was wrong."""

    def __init__(self, held: int, wanted: int, cause: str) -> None:
        super().__init__(f"{cause}: begin an update without delta")
        self.held = held
        self.wanted = wanted


class CollectiveBroken(RolloutServerError):
    """The collective group of an update ended before the update did.

    A member failed, died, did not join, or was stopped. The message names the group and the
    cause; begin again in another group.
    """


class FileOutsideRoot(RolloutServerError):
    """A weight file lies outside the directory that the server may read."""

    def __init__(self, path: str, root: str | None) -> None:
        where = f"below {root}" if root else "nowhere: start it with --weights.directory"
        super().__init__(f"{path!r} may not be read; this server reads weight files {where}")


class FileMissing(RolloutServerError):
    """A weight file is missing."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"{path}: {cause}: write it again under a new update id")


class FileCorrupt(RolloutServerError):
    """A weight file exists, but its bytes are not the announced ones."""

    def __init__(self, path: str, cause: str) -> None:
        super().__init__(f"{path}: {cause}: write it again under a new update id")


class SegmentUnreadable(RolloutServerError):
    """The memory that a sender shares cannot be mapped here."""

    def __init__(self, pid: int, fd: int, cause: str) -> None:
        super().__init__(
            f"descriptor {fd} of process {pid} is not a segment that this server can read "
            f"({cause}); shared memory needs trainer and server on one host, in one container, as "
            "one user: use the inline transport between these two (sync.transport=inline)"
        )


class EngineFailed(RolloutServerError):
    """The engine raised an error that it may not raise; the server stops serving."""

    def __init__(self, engine: str, cause: BaseException) -> None:
        super().__init__(f"engine {engine!r} failed with {type(cause).__name__}: {cause}")
