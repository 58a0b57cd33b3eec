"""How a trajectory travels from a loop worker to the driver: as plain values and token memory.

Invariants:

1. What travels twice otherwise is left out: the task, the messages that the task began with, and
   the images of the task, wherever the trajectory shows them again; the driver has them. Another
   image travels once per trajectory.
2. The values of tokens, images and chosen experts are frames: the driver copies each once, out of
   the message, and makes no object per token. Where only sampled tokens have log-probabilities, the
   others' neither travel nor take memory in the driver, which fills them in on reading.
3. Messages with their calls stay bytes until somebody reads them, and spans stay numbers: the
   driver makes no object per turn. What it asks of every trajectory comes beside them.
4. Counts and participants, of which many trajectories have the same, are one object for all.
5. Whatever a user's code puts into a trajectory, it arrives, though the driver may have none of the
   user's modules: a foreign error becomes the nearest of `agent_loop.errors`, and a trajectory that
   cannot be packed here, or read there, becomes a failed one.

Pickle restores an object of a frozen class by Python code, field by field, which was most of what
a trajectory cost the driver. So objects are taken apart into columns (`_Form`), and made again
without the checks that they passed where they were made. Where one is of a subclass, or holds what
is no plain value, all are pickled as they are, and made at once.
"""

import io
import pickle
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from pickle import PickleBuffer
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

from treadle.agent_loop import (
    AgentTask,
    Exchange,
    Image,
    LoopError,
    Message,
    MessageSource,
    PlacedImage,
    RolloutError,
    RoutedExperts,
    SpanTable,
    Tokens,
    ToolCall,
    Trajectory,
)
from treadle.tracing import Metric, Reduce
from treadle.trainer.rollout.workers.stored_text import StoredText

__all__ = [
    "PackedMessages",
    "PackedTrajectory",
    "WorkerLostError",
    "WorkerTraceback",
    "pack_trajectory",
    "unpack_trajectory",
]

T = TypeVar("T")

PackedTrajectory: TypeAlias = tuple[bytes, tuple[bytes | PickleBuffer, ...]]
"""A pickle of plain values, and the frames that it refers to (pickle protocol 5)."""

_ERRORS = "treadle.agent_loop.errors"
_MAX_SHARED = 1024
"""Number of objects of a kind that are kept for other trajectories; each takes some 350 bytes."""


class WorkerLostError(RolloutError):
    """The loop worker of a trajectory was lost, as often as a task is attempted."""


class WorkerTraceback(Exception):
    """The traceback of an error in a worker, as text; the cause of the error in the driver."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Form(Generic[T]):
    """Takes objects of a frozen dataclass apart into columns, and makes them again.

    Args:
        kind: The class; it has slots.
        nested: Fields that the caller takes apart.
    """

    def __init__(self, kind: type[T], *nested: str) -> None:
        names = [field.name for field in fields(cast(Any, kind)) if field.name not in nested]
        self._kind = kind
        self._values = attrgetter(*names)
        self._setters = [vars(kind)[name].__set__ for name in (*names, *nested)]

    def fits(self, objects: Iterable[object]) -> bool:
        """Returns whether all objects are of the class, and none of a subclass."""
        return all(type(each) is self._kind for each in objects)

    def apart(self, objects: Iterable[T]) -> list[tuple[Any, ...]]:
        """Returns the values of each field that is not nested, in the order of the class."""
        return list(zip(*map(self._values, objects), strict=True))

    def make(self, columns: Sequence[Any], *nested: Sequence[object]) -> list[T]:
        """Returns the objects with these values, without their checks."""
        if not columns:
            return []
        new, kind = object.__new__, self._kind
        made = [new(kind) for _ in columns[0]]
        for set_value, values in zip(self._setters, (*columns, *nested), strict=True):
            # `map` in place of a loop: no Python code runs per object.
            deque(map(set_value, made, values), maxlen=0)
        return made


_APART = ("task", "messages", "samples", "metrics", "error")
_TRAJECTORY = _Form(Trajectory, *_APART)
_NAMES = [f.name for f in fields(Trajectory) if f.name not in _APART]
_MESSAGE = _Form(Message, "tool_calls", "images")
_CALL = _Form(ToolCall)
_TOKENS = _Form(Tokens)
_PLACED = _Form(PlacedImage, "image")
_EXPERTS = _Form(RoutedExperts, "data")


class _NotPlainError(Exception):
    """An object is of a class."""


class _PlainPickler(pickle.Pickler):
    """Pickles strings, numbers, bytes and their collections, whatever is read back of them."""

    def reducer_override(self, obj: object) -> Any:
        """Refuses all that pickle would name a class or a function for."""
        raise _NotPlainError(type(obj).__name__)


class _PlainUnpickler(pickle.Unpickler):
    """Reads what `_PlainPickler` writes, and runs no code for it, whoever wrote it."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuses all classes and functions."""
        raise pickle.UnpicklingError(f"messages have plain values, and not {module}.{name}")


class PackedMessages(MessageSource):
    """Messages as a worker packed them.

    Args:
        given: Those that the task began with, which come first.
        packed: The others, and the text for the trajectory files if the worker has made it.
            Compressed, since the text says most of what the messages say.
        known: Images, for the numbers in `packed`.
        exchange: See `MessageSource`.
        shown: Numbers of the images that the messages show.
    """

    __slots__ = ("_given", "_known", "_packed", "_shown")

    def __init__(
        self,
        given: tuple[Message, ...],
        packed: bytes,
        known: tuple[Image, ...],
        exchange: Exchange,
        shown: tuple[int, ...],
    ) -> None:
        super().__init__(exchange, tuple(known[number] for number in shown))
        self._given = given
        self._packed = packed
        self._known = known
        self._shown = shown

    def make(self) -> tuple[Message, ...]:
        """Returns the messages."""
        apart, _ = self._unpacked()
        return (*self._given, *_messages(apart, self._known))

    def text(self) -> StoredText | None:
        """Returns the text for the trajectory files; None if the worker has not made it."""
        _, text = self._unpacked()
        return None if text is None else StoredText.of_plain(text)

    def _unpacked(self) -> Any:
        return _PlainUnpickler(io.BytesIO(zlib.decompress(self._packed))).load()

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        given = (self._given, self._packed, self._known, self.exchange, self._shown)
        return type(self), given


def pack_trajectory(
    trajectory: Trajectory, task: AgentTask, text: StoredText | None = None
) -> PackedTrajectory:
    """Returns the trajectory of a task that was given, for `unpack_trajectory`.

    Args:
        trajectory: To send.
        task: As it was given.
        text: What the trajectory files say of it; None: the driver makes that, if it needs it.
    """
    try:
        return _packed(trajectory, task, text)
    except Exception as problem:  # the user's objects may raise anything
        cause = LoopError(
            f"task {task.task_id!r}: its trajectory cannot leave the loop worker, because it "
            f"cannot be pickled: {type(problem).__name__}: {problem}"
        )
        # Its frames hold buffers of memoryviews. CPython 3.11 crashes where the garbage collector
        # finds those in a cycle, so nothing may keep them: `cause` has the text only.
        problem.__traceback__ = None
        return _packed(Trajectory.failed(task, cause), task)


def _packed(
    trajectory: Trajectory, task: AgentTask, stored: StoredText | None = None
) -> PackedTrajectory:
    if not _TRAJECTORY.fits([trajectory]):
        raise TypeError(f"it is a {type(trajectory).__name__}, and must be a Trajectory")
    error, text = trajectory.error, ""
    if error is not None:
        text = "".join(traceback.format_exception(error))
        error = _portable(error)
    same = trajectory.task is task or trajectory.task == task
    kept = len(task.messages) if trajectory.messages[: len(task.messages)] == task.messages else 0
    numbers = {image: number for number, image in enumerate(_images_of(task))}
    first = len(numbers)

    def number(image: Image) -> int:
        return numbers.setdefault(image, len(numbers))

    messages = _messages_apart(trajectory.messages[kept:], number)
    samples = [_tokens_apart(tokens, number) for tokens in trajectory.samples]
    packed = None
    if not isinstance(messages, tuple):
        packed = _plain((messages, None if stored is None else stored.plain()))
    exchange = trajectory.exchange
    shown = () if packed is None else tuple(dict.fromkeys(map(number, trajectory.images)))
    flat = (
        _TRAJECTORY.apart([trajectory]),
        None if same else trajectory.task,
        kept,
        (exchange.tools_called, exchange.tools_answered, exchange.user_answered),
        samples,
        _metrics_apart(trajectory.metrics),
        messages if packed is None else PickleBuffer(packed),
        shown,
        error,
        text,
        [(image.mime, PickleBuffer(image.data)) for image in list(numbers)[first:]],
    )
    frames: list[PickleBuffer] = []
    return pickle.dumps(flat, protocol=5, buffer_callback=frames.append), tuple(frames)


def unpack_trajectory(
    packed: PackedTrajectory, task: AgentTask, known: dict[Image, Image]
) -> Trajectory:
    """Returns the trajectory that was packed; one that failed if it cannot be read here.

    Args:
        packed: What has arrived.
        task: The same task. The trajectory shows its images, not copies.
        known: Images of other trajectories of the row, which are used where this one shows them
            too. Gets the others of this one.
    """
    head, frames = packed
    try:
        flat = pickle.loads(head, buffers=frames)
    except Exception as problem:  # what a user's class raises, or that there is no such class
        cause = LoopError(
            f"task {task.task_id!r}: its trajectory cannot be read by the driver: "
            f"{type(problem).__name__}: {problem}; keep to values and classes that the driver has"
        )
        problem.__traceback__ = None  # as in `pack_trajectory`
        return Trajectory.failed(task, cause)
    columns, other, kept, took_part, samples, metrics, messages, shown, error, text, others = flat
    if error is not None:
        error.__cause__ = WorkerTraceback(text)
    images = _images_of(task)
    for mime, data in others:
        image = Image(data=data, mime=mime)
        images.append(known.setdefault(image, image))
    values: dict[str, Any] = {name: value for name, [value] in zip(_NAMES, columns, strict=True)}
    values["task"] = task if other is None else other
    values["samples"] = tuple(_tokens(each, images) for each in samples)
    values["metrics"] = _metrics(metrics)
    values["error"] = error
    given = task.messages[:kept]
    if isinstance(messages, tuple | list):
        every = (*given, *_messages(messages, images))
        return Trajectory(**values, messages=every)
    exchange = _exchange(*took_part)
    source = PackedMessages(given, bytes(messages), tuple(images), exchange, shown)
    return Trajectory.of_source(source, **values)


def _plain(apart: object) -> bytes | None:
    """Returns plain values, packed; None if some are of a class, which the driver may lack."""
    written = io.BytesIO()
    try:
        _PlainPickler(written, protocol=5).dump(apart)
    except _NotPlainError:
        return None
    # The fastest level: the next ones take longer and save a tenth.
    return zlib.compress(written.getvalue(), level=1)


def _images_of(task: AgentTask) -> list[Image]:
    """Returns the different images of a task, in their order."""
    return list(dict.fromkeys(image for message in task.messages for image in message.images))


def _messages_apart(messages: tuple[Message, ...], number: Callable[[Image], int]) -> object:
    calls = [call for message in messages for call in message.tool_calls]
    if not (_MESSAGE.fits(messages) and _CALL.fits(calls)):
        return messages
    return [
        _MESSAGE.apart(messages),
        [len(message.tool_calls) for message in messages],
        _CALL.apart(calls),
        [tuple(map(number, message.images)) for message in messages],
    ]


def _messages(apart: Any, images: Sequence[Image]) -> Sequence[Message]:
    if isinstance(apart, tuple):
        return apart
    columns, counts, calls, numbers = apart
    made = iter(_CALL.make(calls))
    return _MESSAGE.make(
        columns,
        [tuple(islice(made, count)) for count in counts],
        [tuple(images[number] for number in of_message) for of_message in numbers],
    )


def _metrics_apart(metrics: tuple[Metric, ...]) -> object:
    """Returns whether the metrics are plain, and their names, values and rules; else themselves."""
    plain = type(metrics) is tuple and all(
        type(each) is Metric
        and (type(each.name), type(each.reduce)) == (str, Reduce)
        and type(each.value) in (int, float, bool)
        for each in metrics
    )
    return plain, list(zip(*metrics, strict=True)) if plain else metrics


def _metrics(apart: Any) -> Any:
    plain, metrics = apart
    if not plain:
        return metrics
    return tuple(map(_metric, *metrics)) if metrics else ()


@lru_cache(maxsize=_MAX_SHARED, typed=True)  # typed: 1, 1.0 and True are equal
def _metric(name: str, value: float, reduce: Reduce) -> Metric:
    return Metric(name, value, reduce)


@lru_cache(maxsize=_MAX_SHARED)
def _exchange(called: tuple[str, ...], answered: tuple[str | None, ...], by_user: bool) -> Exchange:
    return Exchange(tools_called=called, tools_answered=answered, user_answered=by_user)


def _tokens_apart(tokens: Tokens, number: Callable[[Image], int]) -> object:
    table = tokens.span_table
    if table is None or not (_TOKENS.fits([tokens]) and _PLACED.fits(tokens.images)):
        return tokens
    experts = [] if tokens.routed_experts is None else [tokens.routed_experts]
    return [
        tokens.ids,
        PickleBuffer(table.pack_logprobs(tokens.logprobs)),
        table.values,
        _PLACED.apart(tokens.images),
        [number(placed.image) for placed in tokens.images],
        _EXPERTS.apart(experts),
        [PickleBuffer(each.data) for each in experts],
    ]


def _tokens(apart: Any, images: list[Image]) -> Tokens:
    if isinstance(apart, Tokens):
        return apart
    ids, logprobs, spans, placed, numbers, experts, data = apart
    table = SpanTable(spans)
    return Tokens.of_source(
        table,
        ids=ids,
        logprobs=table.unpack_logprobs(logprobs),
        images=tuple(_PLACED.make(placed, [images[number] for number in numbers])),
        routed_experts=next(iter(_EXPERTS.make(experts, data)), None),
    )


def _portable(error: RolloutError) -> RolloutError:
    """Returns the error, or one of this package's with its text, if the driver may not have it."""
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == _ERRORS)
    if type(error) is known or type(error) is WorkerLostError:
        return error
    plainer: RolloutError = known(f"{type(error).__name__}: {error}")
    plainer.__dict__.update({k: v for k, v in vars(error).items() if k in ("tool", "__notes__")})
    plainer.retryable = error.retryable
    return plainer
