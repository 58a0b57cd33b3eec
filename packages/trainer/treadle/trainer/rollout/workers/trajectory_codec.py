"""Tasks and trajectories as protobuf: between driver and loop workers, and in files of groups.

Invariants:

1. What travels twice otherwise is left out: the task, the messages that the task began with, and
   the images of the task, wherever the trajectory shows them again; the reader has them. Another
   image travels once per trajectory, or once per message of several tasks.
2. The memory of tokens, images and chosen experts is copied, and no object is made per token. Where
   only sampled tokens have log-probabilities, the others' neither travel nor take memory in the
   driver, which fills them in on reading.
3. Messages with their calls stay bytes until somebody reads them, and spans stay numbers: the
   driver makes no object per turn. What it reads of every trajectory comes beside them.
4. Counts and participants, of which many trajectories have the same, are one object for all.
5. Values of a user are plain (`plain_values`). A trajectory with another value, or that cannot be
   read, becomes a failed one. An error of a user's class becomes the nearest of
   `agent_loop.errors`.
6. Reading makes values of known classes only, so it runs no code of whoever wrote.
"""

import traceback
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Real
from typing import Any, cast

from treadle.agent_loop import (
    AgentTask,
    Exchange,
    Finding,
    Image,
    IntArray,
    LoopError,
    Message,
    MessageSource,
    PlacedImage,
    RolloutError,
    RoutedExperts,
    SampleReward,
    SpanTable,
    StopReason,
    Tokens,
    ToolCall,
    Trajectory,
    errors,
)
from treadle.loop_worker.v1 import trajectory_pb2 as pb
from treadle.tracing import Metric, Reduce
from treadle.trainer.rollout.workers.plain_values import (
    NotPlainError,
    check_text,
    from_plain_json,
    from_wire,
    plain_json,
    to_wire,
)
from treadle.trainer.rollout.workers.stored_text import StoredText

__all__ = [
    "ImageNumbers",
    "PackedMessages",
    "WorkerLostError",
    "WorkerTraceback",
    "messages_crc32",
    "pack_task",
    "pack_trajectory",
    "read_task",
    "read_trajectory",
    "write_trajectory",
]

_NUMBERS = frozenset({int, float, bool})
_MAX_SHARED = 1024
"""Number of objects of a kind that are kept for other trajectories; each takes some 350 bytes."""


class WorkerLostError(RolloutError):
    """The loop worker of a trajectory was lost, as often as a task is attempted."""


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text; the cause of the error in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ImageNumbers:
    """Numbers images in the order in which they are first seen.

    Args:
        known: The images that the reader has, which get the first numbers.
    """

    def __init__(self, known: Iterable[Image] = ()) -> None:
        self._numbers = {image: number for number, image in enumerate(known)}
        self._num_known = len(self._numbers)

    def __call__(self, image: Image) -> int:
        """Returns the number of an image."""
        return self._numbers.setdefault(image, len(self._numbers))

    def write_new(self, into: Any) -> None:
        """Adds those that the reader lacks to a field of a message."""
        for image in list(self._numbers)[self._num_known :]:
            into.add(mime=image.mime, data=image.data)


def read_images(images: Iterable[pb.Image], known: dict[Image, Image]) -> list[Image]:
    """Returns the images of a message, or equal ones from `known`; adds new ones to it."""
    made = (Image(data=image.data, mime=image.mime) for image in images)
    return [known.setdefault(image, image) for image in made]


class PackedMessages(MessageSource):
    """Messages as they came.

    Args:
        given: Messages that the task began with, which come first.
        packed: The others, and the text for the trajectory files if the worker has made it: a
            `Conversation`, compressed, since the text repeats most of the messages.
        images: Images by their numbers in `packed`.
        shown: Numbers of the images that the messages show.
    """

    __slots__ = ("given", "numbered", "packed", "shown")

    def __init__(
        self,
        given: tuple[Message, ...],
        packed: bytes,
        images: tuple[Image, ...],
        exchange: Exchange,
        shown: tuple[int, ...],
    ) -> None:
        super().__init__(exchange, tuple(images[number] for number in shown))
        self.given = given
        self.packed = packed
        self.numbered = images
        self.shown = shown

    def make(self) -> tuple[Message, ...]:
        """Returns the messages."""
        read = (_message(each, self.numbered) for each in self._conversation().messages)
        return (*self.given, *read)

    def is_packed_for(self, task: AgentTask) -> bool:
        """Returns whether it is what a reader with this task can read."""
        images = _images_of(task)
        return (
            self.given == task.messages[: len(self.given)]
            and list(self.numbered[: len(images)]) == images
        )

    def text(self) -> StoredText | None:
        """Returns the text for the trajectory files; None if the worker has not made it."""
        conversation = self._conversation()
        if not conversation.HasField("text"):
            return None
        return StoredText(
            messages=conversation.text.messages,
            response=conversation.text.response,
            spans=tuple(
                (each.text, IntArray.of_buffer(each.begins)) for each in conversation.text.spans
            ),
        )

    def _conversation(self) -> pb.Conversation:
        return pb.Conversation.FromString(zlib.decompress(self.packed))


def messages_crc32(task: AgentTask) -> int:
    """Returns the CRC-32 of the messages of a task, and of their images."""
    number = ImageNumbers()
    packed = pb.Conversation(messages=_pack_messages(task.messages, number))
    crc = zlib.crc32(packed.SerializeToString(deterministic=True))
    for image in _images_of(task):
        crc = zlib.crc32(image.data, crc)
    return crc


def pack_task(task: AgentTask, number: Callable[[Image], int]) -> pb.AgentTask:
    """Returns a task for `read_task`.

    Args:
        number: Numbers the images of its messages.

    Raises:
        NotPlainError: It has a value that is not plain.
        ValueError: It has a number that is too large.
    """
    return pb.AgentTask(
        task_id=check_text(task.task_id, "task_id"),
        sample_index=task.sample_index,
        rollout_index=task.rollout_index,
        loop=check_text(task.loop, "loop"),
        messages=_pack_messages(task.messages, number),
        fields=plain_json(task.fields, "fields"),
        seed=task.seed,
    )


def read_task(packed: pb.AgentTask, images: Sequence[Image]) -> AgentTask:
    """Returns the task that was packed.

    Args:
        images: Images of its message, by their numbers.
    """
    return AgentTask(
        task_id=from_wire(packed.task_id),
        sample_index=packed.sample_index,
        rollout_index=packed.rollout_index,
        loop=from_wire(packed.loop),
        messages=tuple(_message(each, images) for each in packed.messages),
        fields=from_plain_json(packed.fields),
        seed=packed.seed if packed.HasField("seed") else None,
    )


def pack_trajectory(
    trajectory: Trajectory, task: AgentTask, text: StoredText | None = None
) -> pb.Trajectory:
    """Returns a trajectory for `read_trajectory`; one that failed where it cannot be packed.

    Args:
        task: The task that was given, which the reader has.
        text: Text for the trajectory files; None: the driver makes that, if it needs it.
    """
    try:
        return write_trajectory(trajectory, task, text)
    except Exception as problem:  # the user's objects may raise anything
        cause = LoopError(
            f"task {task.task_id!r}: its trajectory cannot leave the loop worker: "
            f"{type(problem).__name__}: {problem}"
        )
        return write_trajectory(Trajectory.failed(task, cause), task)


def write_trajectory(
    trajectory: Trajectory, task: AgentTask, text: StoredText | None = None
) -> pb.Trajectory:
    """Returns a trajectory for `read_trajectory`, see `pack_trajectory`.

    Raises:
        Exception: It has a value that cannot be packed; the message has its place.
    """
    if type(trajectory) is not Trajectory:
        raise TypeError(f"it is a {type(trajectory).__name__}, and must be a Trajectory")
    packed = pb.Trajectory(
        stop=StopReason(trajectory.stop).value,
        assistant_turns=trajectory.assistant_turns,
        user_turns=trajectory.user_turns,
        reward=trajectory.reward,
        sample_rewards=(
            pb.SampleReward(player=check_text(each.player, "player"), value=each.value)
            for each in trajectory.sample_rewards
        ),
        answer=_optional_text(trajectory.answer, "answer"),
        tool_rewards=trajectory.tool_rewards,
        turn_scores=trajectory.turn_scores,
        metrics=_pack_metrics(trajectory.metrics),
        findings=(
            pb.Finding(kind=check_text(each.kind, "kind"), text=check_text(each.text, "text"))
            for each in trajectory.findings
        ),
        error=None if trajectory.error is None else _pack_error(trajectory.error),
    )
    number = ImageNumbers(_images_of(task))
    # First: where it is as it came, its images have the numbers that they came with.
    _pack_conversation(packed, trajectory, task, text, number)
    if trajectory.task is not task and trajectory.task != task:
        packed.task.CopyFrom(pack_task(trajectory.task, number))
    for tokens in trajectory.samples:
        packed.samples.append(_pack_tokens(tokens, number))
    number.write_new(packed.images)
    return packed


def read_trajectory(
    packed: pb.Trajectory, task: AgentTask, known: dict[Image, Image]
) -> Trajectory:
    """Returns the trajectory that was packed.

    Args:
        task: The task that the writer was given. The trajectory shows its images, not copies.
        known: Images of other trajectories of the row, which are used where this one shows them
            too. Gets the others of this one.

    Raises:
        Exception: It is not what `pack_trajectory` writes.
    """
    images = [*_images_of(task), *read_images(packed.images, known)]
    shown = tuple(packed.shown)
    source = PackedMessages(
        task.messages[: packed.num_given],
        packed.conversation,
        tuple(images),
        _exchange(packed.exchange),
        shown,
    )
    return Trajectory.of_source(
        source,
        task=read_task(packed.task, images) if packed.HasField("task") else task,
        samples=tuple(_tokens(each, images) for each in packed.samples),
        stop=StopReason(packed.stop),
        assistant_turns=packed.assistant_turns,
        user_turns=packed.user_turns,
        reward=packed.reward if packed.HasField("reward") else None,
        sample_rewards=tuple(
            SampleReward(player=from_wire(each.player), value=each.value)
            for each in packed.sample_rewards
        ),
        answer=from_wire(packed.answer) if packed.HasField("answer") else None,
        tool_rewards=tuple(packed.tool_rewards),
        turn_scores=tuple(packed.turn_scores),
        metrics=tuple(map(_metric, *from_plain_json(packed.metrics))),
        findings=tuple(
            Finding(kind=from_wire(each.kind), text=from_wire(each.text))
            for each in packed.findings
        ),
        error=_error(packed.error) if packed.HasField("error") else None,
    )


def _images_of(task: AgentTask) -> list[Image]:
    """Returns the different images of a task, in their order."""
    return list(dict.fromkeys(image for message in task.messages for image in message.images))


def _pack_conversation(
    packed: pb.Trajectory,
    trajectory: Trajectory,
    task: AgentTask,
    text: StoredText | None,
    number: ImageNumbers,
) -> None:
    source = trajectory.source
    if isinstance(source, PackedMessages) and source.is_packed_for(task):
        packed.num_given, packed.conversation = len(source.given), source.packed
        for image in source.numbered:
            number(image)
    else:
        messages, num_given = trajectory.messages, len(task.messages)
        kept = num_given if messages[:num_given] == task.messages else 0
        conversation = pb.Conversation(
            messages=_pack_messages(messages[kept:], number),
            text=None if text is None else _pack_text(text),
        )
        packed.num_given = kept
        # The fastest level: the next ones take longer and save a tenth. The tables of the usual
        # window, 256 KB, take more time than a conversation.
        squeeze = zlib.compressobj(1, zlib.DEFLATED, wbits=13, memLevel=6)
        packed.conversation = squeeze.compress(conversation.SerializeToString()) + squeeze.flush()
    packed.shown.extend(dict.fromkeys(map(number, trajectory.images)))
    exchange = trajectory.exchange
    called, answered = exchange.tools_called, exchange.tools_answered
    packed.exchange = plain_json([called, answered, exchange.user_answered], "names of tools")


def _pack_text(text: StoredText) -> pb.StoredText:
    spans = (pb.SpanTexts(text=each, begins=begins.data.tobytes()) for each, begins in text.spans)
    return pb.StoredText(messages=text.messages, response=text.response, spans=spans)


def _pack_messages(
    messages: Sequence[Message], number: Callable[[Image], int]
) -> Iterable[pb.Message]:
    for index, message in enumerate(messages):
        try:
            yield _pack_message(message, number)
        except NotPlainError as error:
            raise error.of(f"messages[{index}]") from None


def _pack_message(message: Message, number: Callable[[Image], int]) -> pb.Message:
    if type(message) is not Message:
        raise TypeError(f"a message is a {type(message).__name__}, and must be a Message")
    return pb.Message(
        role=message.role,
        content=check_text(message.content, "content"),
        tool_calls=[
            pb.ToolCall(
                id=check_text(call.id, "tool_calls.id"),
                name=check_text(call.name, "tool_calls.name"),
                arguments=plain_json(call.arguments, "tool_calls.arguments"),
            )
            for call in message.tool_calls
        ],
        tool_call_id=_optional_text(message.tool_call_id, "tool_call_id"),
        name=_optional_text(message.name, "name"),
        reasoning=_optional_text(message.reasoning, "reasoning"),
        images=map(number, message.images),
    )


def _optional_text(value: str | None, what: str) -> bytes | None:
    return None if value is None else check_text(value, what)


def _message(packed: pb.Message, images: Sequence[Image]) -> Message:
    def optional(name: str) -> str | None:
        return from_wire(getattr(packed, name)) if packed.HasField(cast(Any, name)) else None

    return Message(
        role=cast(Any, packed.role),
        content=from_wire(packed.content),
        tool_calls=tuple(
            ToolCall(
                id=from_wire(call.id),
                name=from_wire(call.name),
                arguments=from_plain_json(call.arguments),
            )
            for call in packed.tool_calls
        ),
        tool_call_id=optional("tool_call_id"),
        name=optional("name"),
        reasoning=optional("reasoning"),
        images=tuple(images[number] for number in packed.images),
    )


def _pack_metrics(metrics: Sequence[Metric]) -> bytes:
    values = [value for _, value, _ in metrics]
    if not _NUMBERS.issuperset(map(type, values)):
        values = [float(v) if isinstance(v, Real) else v for v in values]  # those of numpy
    columns = [[name for name, _, _ in metrics], values, [rule.value for _, _, rule in metrics]]
    return plain_json(columns, "metrics")


@lru_cache(maxsize=_MAX_SHARED, typed=True)  # typed: 1, 1.0 and True are equal
def _metric(name: str, value: float, rule: str) -> Metric:
    return Metric(name, value, Reduce(rule))


@lru_cache(maxsize=_MAX_SHARED)
def _exchange(packed: bytes) -> Exchange:
    called, answered, by_user = from_plain_json(packed)
    return Exchange(tools_called=called, tools_answered=answered, user_answered=by_user)


def _pack_tokens(tokens: Tokens, number: Callable[[Image], int]) -> pb.Sample:
    table = tokens.span_table
    if table is None:
        raise ValueError("a span of a sample has a position or weight version beyond 32 bits")
    experts = tokens.routed_experts
    return pb.Sample(
        ids=tokens.ids.data.tobytes(),
        logprobs=bytes(table.pack_logprobs(tokens.logprobs)),
        spans=table.values.data.tobytes(),
        images=(
            pb.PlacedImage(
                image=number(placed.image), start=placed.start, num_tokens=placed.num_tokens
            )
            for placed in tokens.images
        ),
        routed_experts=None
        if experts is None
        else pb.RoutedExperts(
            first=experts.first,
            num_layers=experts.num_layers,
            top_k=experts.top_k,
            id_bytes=experts.id_bytes,
            data=experts.data,
        ),
        sampling_masks=tokens.sampling_masks,
    )


def _tokens(packed: pb.Sample, images: Sequence[Image]) -> Tokens:
    table = SpanTable(IntArray.of_buffer(packed.spans))
    ids, experts = IntArray.of_buffer(packed.ids), packed.routed_experts
    if len(ids) != table.num_tokens:
        raise ValueError(f"{len(ids)} ids have spans of {table.num_tokens} tokens")
    return Tokens.of_source(
        table,
        ids=ids,
        logprobs=table.unpack_logprobs(packed.logprobs),
        images=tuple(
            PlacedImage(image=images[each.image], start=each.start, num_tokens=each.num_tokens)
            for each in packed.images
        ),
        routed_experts=RoutedExperts(
            first=experts.first,
            num_layers=experts.num_layers,
            top_k=experts.top_k,
            id_bytes=experts.id_bytes,
            data=experts.data,
        )
        if packed.HasField("routed_experts")
        else None,
        sampling_masks=tuple(packed.sampling_masks),
    )


def _known_kind(error: RolloutError) -> type[RolloutError]:
    """Returns the nearest class of an error that the driver has, whatever the worker has."""
    kinds = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return WorkerLostError if isinstance(error, WorkerLostError) else next(kinds)


def _pack_error(error: RolloutError) -> pb.TrajectoryError:
    kind, own = _known_kind(error), vars(error)
    text = str(error) if type(error) is kind else f"{type(error).__name__}: {error}"
    return pb.TrajectoryError(
        kind=kind.__name__,
        message=to_wire(text),
        traceback=to_wire("".join(traceback.format_exception(error))),
        retryable=error.retryable,
        tool=_optional_text(own.get("tool"), "error.tool"),
        notes=(check_text(note, "a note of an error") for note in own.get("__notes__", ())),
    )


def _error(packed: pb.TrajectoryError) -> RolloutError:
    kind = WorkerLostError if packed.kind == "WorkerLostError" else getattr(errors, packed.kind)
    if not (isinstance(kind, type) and issubclass(kind, RolloutError)):
        raise ValueError(f"{packed.kind} is no error of a rollout")
    error = kind(from_wire(packed.message))
    if packed.HasField("tool"):
        vars(error)["tool"] = from_wire(packed.tool)
    for note in packed.notes:
        error.add_note(from_wire(note))
    error.retryable = packed.retryable
    error.__cause__ = WorkerTraceback(from_wire(packed.traceback))
    return error
