"""The transcript: the ledger of a trajectory's tokens, and their only writer.

Invariants, at every moment:

1. ids, log-probabilities and spans describe the same L tokens.
2. Spans are not empty, tile [0, L) in order, and the first one is the PROMPT.
3. The loss mask is True exactly on SAMPLED spans, which it is made of; elsewhere the
   log-probability is 0.0.
4. A SAMPLED span has one weight version; other spans have none.
5. Images lie completely within PROMPT and OBSERVED spans, in order, without overlap.
6. Experts, if the engine reports them, are those of the first E <= L rows; a row's experts are
   those with which the engine computed it first.
7. Sampling masks, if the engine reports them, are those of its tokens; any other has the whole
   vocabulary.
8. Written tokens never change: each state is a prefix of every later one, and the prompt of turn
   n+1 begins with all tokens of turn n.

Sampled ids are the truth: text is a view of them, and nothing is retokenised. A token takes 8
bytes, in memory and where a trajectory crosses a process: an id and a log-probability (`arrays`).

    prompt = renderer.render(messages, tools=specs)
    transcript = Transcript(prompt.ids, images=prompt.images)
    transcript.sample(await generator.generate(transcript.ids, params, request=request))
    answer = renderer.extend(transcript.ids, [message], tools=specs)
    transcript.observe(answer.ids, images=answer.images)
    tokens = transcript.freeze(max_response_tokens=1024)

One task owns a transcript; nothing waits.
"""

import enum
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from treadle.agent_loop.tokens.arrays import BoolArray, FloatArray, IntArray, LateMemory
from treadle.agent_loop.tokens.late_field import FieldSource, LateField
from treadle.agent_loop.tokens.renderer import PlacedImage, Rendering
from treadle.agent_loop.types import Completion, RoutedExperts


class Origin(enum.StrEnum):
    """The writer of a span."""

    PROMPT = "prompt"
    SAMPLED = "sampled"
    OBSERVED = "observed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens [start, stop) of one origin and, if sampled, of one weight version."""

    origin: Origin
    start: int
    stop: int
    weight_version: int | None = None


_ORIGINS: Final = tuple(Origin)
_SAMPLED: Final = _ORIGINS.index(Origin.SAMPLED)
_FLOAT_BYTES: Final = 4
_MAX_NUMBER: Final = 2**32 - 1
_WHOLE: Final = b"\x00"
"""The sampling mask that keeps the whole vocabulary."""


class SpanTable(FieldSource[tuple[Span, ...]]):
    """Spans as numbers, without an object for each.

    Args:
        values: uint32, [4 N]: of N spans the numbers of their origins in `Origin`, then all starts,
            all stops, and all weight versions plus one, or 0 for none.
    """

    __slots__ = ("_num_sampled", "values")

    def __init__(self, values: IntArray) -> None:
        super().__init__()
        self.values = values
        self._num_sampled: int | None = None

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Self | None:
        """Returns the spans as numbers; None if one has what no `Transcript` writes there."""
        if not all(type(span) is Span for span in spans):
            return None
        origins = [span.origin for span in spans]
        starts, stops = [span.start for span in spans], [span.stop for span in spans]
        versions = [0 if s.weight_version is None else s.weight_version + 1 for s in spans]
        if not all(type(origin) is Origin for origin in origins):
            return None
        if any(s.weight_version is not None and s.weight_version < 0 for s in spans):
            return None
        numbers = [*starts, *stops, *versions]
        if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers):
            return None
        return cls(IntArray([*map(_ORIGINS.index, origins), *numbers]))

    def __len__(self) -> int:
        return len(self.values) // 4

    @property
    def columns(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """[N] origins, starts, stops, and weight versions plus one."""
        values, count = self.values, len(self)
        return (
            values[:count],
            values[count : 2 * count],
            values[2 * count : 3 * count],
            values[3 * count :],
        )

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the first span."""
        return self.values[2 * len(self)] if len(self) else 0

    @property
    def num_tokens(self) -> int:
        """Position after the last span."""
        return self.values[3 * len(self) - 1] if len(self) else 0

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        if self._num_sampled is None:
            self._num_sampled = sum(stop - start for start, stop in self.sampled())
        return self._num_sampled

    def sampled(self) -> list[tuple[int, int]]:
        """Returns start and stop of each sampled span."""
        values, n = self.values.data.tolist(), len(self)
        spans = zip(values[:n], values[n : 2 * n], values[2 * n : 3 * n], strict=True)
        return [(start, stop) for origin, start, stop in spans if origin == _SAMPLED]

    def rows(self) -> Iterator[tuple[Origin, int, int, int | None]]:
        """Yields origin, start, stop and weight version of each span."""
        values, n = self.values.data.tolist(), len(self)
        columns = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n :]
        for origin, start, stop, version in zip(*columns, strict=True):
            yield _ORIGINS[origin], start, stop, version - 1 if version else None

    def pack_logprobs(self, logprobs: FloatArray) -> bytes | memoryview:
        """Returns the memory of the sampled tokens' alone, or of all if another one's is not 0."""
        data = logprobs.data
        sampled = b"".join(data[start:stop] for start, stop in self.sampled())
        # As bytes, since -0.0 equals 0.0.
        same = self.unpack_logprobs(sampled).data.tobytes() == data.tobytes()
        return sampled if same else data

    def unpack_logprobs(self, packed: bytes) -> FloatArray:
        """Returns the log-probabilities of all tokens, of what `pack_logprobs` returned."""
        if len(packed) == _FLOAT_BYTES * self.num_tokens:
            return FloatArray.of_buffer(packed)
        return FloatArray.of_late(_SampledLogprobs(packed, self))

    def make(self) -> tuple[Span, ...]:
        """Returns the spans."""
        return tuple(
            Span(origin=origin, start=start, stop=stop, weight_version=version)
            for origin, start, stop, version in self.rows()
        )


class _SampledLogprobs(LateMemory):
    """Log-probabilities of L tokens, in the memory of those of the S sampled ones; others are 0.

    Args:
        sampled: Array of shape [S], float32.
        spans: Spans of the tokens; there is at least one.
    """

    __slots__ = ("_length", "_sampled", "_spans")

    def __init__(self, sampled: bytes, spans: SpanTable) -> None:
        self._length = spans.num_tokens
        self._sampled = sampled
        self._spans = spans

    def __len__(self) -> int:
        return self._length

    def read(self) -> bytes:
        """Returns the log-probabilities of all tokens, float32, [L]."""
        sampled, zero = self._sampled, bytes(_FLOAT_BYTES)
        parts: list[bytes] = []
        first = done = 0
        for start, stop in self._spans.sampled():
            last = first + _FLOAT_BYTES * (stop - start)
            parts += zero * (start - done), sampled[first:last]
            first, done = last, stop
        return b"".join([*parts, zero * (self._length - done)])


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Tokens(LateField[SpanTable]):
    """A frozen transcript of L tokens. L is 0 only in a trajectory that failed.

    Attributes:
        ids: Array of shape [L], uint32.
        logprobs: [L], float32, nats; 0.0 where the mask is False.
        spans: They tile the range [0, L).
        images: In the order of their positions, which count from the first id.
        routed_experts: Experts of the first rows, at most L; None if they were not requested.
        sampling_masks: [L], as `TokenChunk.sampling_masks`; the whole vocabulary where no mask was
            requested. Empty if none was requested at all.

    Args are any sequences of numbers, which become arrays.

    Raises:
        ValueError: There are not as many log-probabilities as ids, or the spans end elsewhere.
    """

    _LATE: ClassVar[str] = "spans"

    ids: IntArray
    logprobs: FloatArray
    spans: tuple[Span, ...]
    images: tuple[PlacedImage, ...] = ()
    routed_experts: RoutedExperts | None = None
    sampling_masks: tuple[bytes, ...] = ()

    def __init__(
        self,
        *,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: tuple[Span, ...],
        images: tuple[PlacedImage, ...] = (),
        routed_experts: RoutedExperts | None = None,
        sampling_masks: tuple[bytes, ...] = (),
    ) -> None:
        length = len(ids)
        if len(logprobs) != length:
            raise ValueError(f"{length} ids have {len(logprobs)} logprobs")
        if sampling_masks and len(sampling_masks) != length:
            raise ValueError(f"{length} ids have {len(sampling_masks)} sampling masks")
        if length != (spans[-1].stop if spans else 0):
            raise ValueError(f"{length} ids have spans {spans}, which do not tile them")
        object.__setattr__(self, "ids", IntArray.of(ids))
        object.__setattr__(self, "logprobs", FloatArray.of(logprobs))
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "routed_experts", routed_experts)
        object.__setattr__(self, "sampling_masks", sampling_masks)

    @classmethod
    def empty(cls) -> "Tokens":
        """Returns the tokens of an attempt that failed."""
        return cls(ids=(), logprobs=(), spans=())

    def runs(self) -> Iterable[tuple[Origin, int, int, int | None]]:
        """Yields origin, start, stop and weight version of each span, without making `spans`."""
        if self.source is not None:
            return self.source.rows()
        return ((s.origin, s.start, s.stop, s.weight_version) for s in self.spans)

    @property
    def span_table(self) -> SpanTable | None:
        """The spans as numbers; None if one has what no `Transcript` writes there."""
        return SpanTable.of(self.spans) if self.source is None else self.source

    @property
    def loss_mask(self) -> BoolArray:
        """[L]; True on sampled tokens. Made of the spans at each call."""
        mask = bytearray(len(self.ids))
        for origin, start, stop, _ in self.runs():
            if origin is Origin.SAMPLED:
                mask[start:stop] = b"\x01" * (stop - start)
        return BoolArray.of_buffer(bytes(mask))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first completion."""
        if self.source is not None:
            return self.source.num_prompt
        return self.spans[0].stop if self.spans else 0

    @property
    def prompt_ids(self) -> IntArray:
        """[P] ids of the prompt."""
        return self.ids[: self.num_prompt_tokens]

    @property
    def response_ids(self) -> IntArray:
        """[L - P] ids after the prompt, sampled and observed."""
        return self.ids[self.num_prompt_tokens :]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens under the loss mask."""
        if self.source is not None:
            return self.source.num_sampled
        return sum(s.stop - s.start for s in self.spans if s.origin is Origin.SAMPLED)

    @property
    def weight_versions(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of the sampled tokens; None if there are none."""
        versions = [version for *_, version in self.runs() if version is not None]
        return (min(versions), max(versions)) if versions else None


class Transcript:
    """The growing ledger of one trajectory.

    Args:
        prompt: [P] ids, at least one.
        images: Images of the prompt, as in its `Rendering`.

    Raises:
        ValueError: The prompt is empty, or an image does not lie within it.
    """

    def __init__(self, prompt: Sequence[int], *, images: Sequence[PlacedImage] = ()) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; a transcript needs at least one prompt id")
        self._ids = array("I", prompt)
        self._logprobs = array("f", bytes(4 * len(prompt)))
        self._spans = [Span(origin=Origin.PROMPT, start=0, stop=len(prompt))]
        self._images = list(Rendering(ids=tuple(prompt), images=tuple(images)).images)
        self._experts: list[RoutedExperts] = []
        self._masks: list[bytes] = []

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> IntArray:
        """[L] ids so far, which are the prompt of the next completion."""
        return IntArray.of_buffer(self._ids.tobytes())

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """All images so far; positions count from the first id."""
        return tuple(self._images)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the first prompt."""
        return self._spans[0].stop

    @property
    def num_response_tokens(self) -> int:
        """Number of tokens after the first prompt, sampled and observed."""
        return len(self._ids) - self.num_prompt_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens written by `sample`."""
        return sum(s.stop - s.start for s in self._spans if s.origin is Origin.SAMPLED)

    @property
    def num_routed_rows(self) -> int:
        """Number of first rows whose experts are known; the next completion reports the rest."""
        return self._experts[-1].stop if self._experts else 0

    def sample(self, completion: Completion) -> None:
        """Writes a completion, one span per run of tokens with the same weight version.

        Raises:
            ValueError: The completion's experts do not continue those before them.
        """
        experts = completion.routed_experts
        if experts is not None and experts.first != self.num_routed_rows:
            raise ValueError(
                f"the completion reports experts from row {experts.first} on; those of "
                f"{self.num_routed_rows} rows are known"
            )
        for chunk in completion.chunks:
            if chunk.sampling_masks:
                self._masks += [_WHOLE] * (len(self._ids) - len(self._masks))
                self._masks += chunk.sampling_masks
            self._write(chunk.token_ids, chunk.logprobs, Origin.SAMPLED, chunk.weight_version)
        if experts is not None:
            self._experts.append(experts.until(len(self._ids)))

    def observe(self, token_ids: Sequence[int], *, images: Sequence[PlacedImage] = ()) -> None:
        """Writes tokens that the model did not sample: tool results, user turns, template glue.

        Args:
            token_ids: Array of shape [R], one per row.
            images: Images of these ids; positions count from the first of them.

        Raises:
            ValueError: An image does not lie within these ids.
        """
        placed = Rendering(ids=tuple(token_ids), images=tuple(images)).images
        self._images.extend(image.shifted(len(self._ids)) for image in placed)
        self._write(token_ids, array("f", bytes(4 * len(token_ids))), Origin.OBSERVED, None)

    def freeze(self, *, max_response_tokens: int | None = None) -> Tokens:
        """Returns the tokens so far; the transcript may continue to grow.

        Args:
            max_response_tokens: Maximum number of tokens after the prompt; an image that would be
                cut is dropped completely. None means all tokens.

        Raises:
            ValueError: `max_response_tokens` is negative.
        """
        size = len(self._ids)
        if max_response_tokens is not None:
            if max_response_tokens < 0:
                raise ValueError(
                    f"max_response_tokens is {max_response_tokens}; it must be at least 0"
                )
            size = min(size, self.num_prompt_tokens + max_response_tokens)
            size = next((i.start for i in self._images if i.start < size < i.stop), size)
        spans: list[Span] = []
        for span in self._spans:
            stop = min(span.stop, size)
            if stop <= span.start:
                break
            spans.append(
                Span(
                    origin=span.origin,
                    start=span.start,
                    stop=stop,
                    weight_version=span.weight_version,
                )
            )
        return Tokens(
            ids=IntArray.of_buffer(self._ids[:size].tobytes()),
            logprobs=FloatArray.of_buffer(self._logprobs[:size].tobytes()),
            spans=tuple(spans),
            images=tuple(image for image in self._images if image.stop <= size),
            routed_experts=(
                self._experts[0].followed_by(self._experts[1:]).until(size)
                if self._experts
                else None
            ),
            sampling_masks=(
                tuple((self._masks + [_WHOLE] * (size - len(self._masks)))[:size])
                if self._masks
                else ()
            ),
        )

    def _write(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        origin: Origin,
        weight_version: int | None,
    ) -> None:
        if not token_ids:
            return
        start = len(self._ids)
        self._ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        last = self._spans[-1]
        if (last.origin, last.weight_version) == (origin, weight_version):
            start = last.start
            self._spans.pop()
        self._spans.append(
            Span(origin=origin, start=start, stop=len(self._ids), weight_version=weight_version)
        )
