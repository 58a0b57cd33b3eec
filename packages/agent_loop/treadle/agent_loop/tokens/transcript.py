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
7. Written tokens never change: each state is a prefix of every later one, and the prompt of turn
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
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.agent_loop.tokens.arrays import BoolArray, FloatArray, IntArray
from treadle.agent_loop.tokens.renderer import PlacedImage, Rendering
from treadle.agent_loop.types import Completion, RoutedExperts


class Origin(enum.StrEnum):
    """Who wrote a span."""

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


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class Tokens:
    """A frozen transcript of L tokens. L is 0 only in a trajectory that failed.

    Attributes:
        ids: [L], uint32.
        logprobs: [L], float32, nats; 0.0 where the mask is False.
        spans: Tile [0, L).
        images: In the order of their positions, which count from the first id.
        routed_experts: Of the first rows, at most L; None if the engine was not asked for them.

    Args are any sequences of numbers, which become arrays.

    Raises:
        ValueError: There are not as many log-probabilities as ids, or the spans end elsewhere.
    """

    ids: IntArray
    logprobs: FloatArray
    spans: tuple[Span, ...]
    images: tuple[PlacedImage, ...] = ()
    routed_experts: RoutedExperts | None = None

    def __init__(
        self,
        *,
        ids: Sequence[int],
        logprobs: Sequence[float],
        spans: tuple[Span, ...],
        images: tuple[PlacedImage, ...] = (),
        routed_experts: RoutedExperts | None = None,
    ) -> None:
        length = len(ids)
        if len(logprobs) != length:
            raise ValueError(f"{length} ids have {len(logprobs)} logprobs")
        if length != (spans[-1].stop if spans else 0):
            raise ValueError(f"{length} ids have spans {spans}, which do not tile them")
        object.__setattr__(self, "ids", IntArray(ids))
        object.__setattr__(self, "logprobs", FloatArray(logprobs))
        object.__setattr__(self, "spans", spans)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "routed_experts", routed_experts)

    @classmethod
    def empty(cls) -> "Tokens":
        """Returns the tokens of an attempt that failed."""
        return cls(ids=(), logprobs=(), spans=())

    @property
    def loss_mask(self) -> BoolArray:
        """[L]; True on sampled tokens. Made of the spans at each call."""
        mask = bytearray(len(self.ids))
        for span in self.spans:
            if span.origin is Origin.SAMPLED:
                mask[span.start : span.stop] = b"\x01" * (span.stop - span.start)
        return BoolArray.of_buffer(mask)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens before the first completion."""
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
        return sum(s.stop - s.start for s in self.spans if s.origin is Origin.SAMPLED)

    @property
    def weight_versions(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of the sampled tokens; None if there are none."""
        versions = [s.weight_version for s in self.spans if s.weight_version is not None]
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
            self._write(chunk.token_ids, chunk.logprobs, Origin.SAMPLED, chunk.weight_version)
        if experts is not None:
            self._experts.append(experts.until(len(self._ids)))

    def observe(self, token_ids: Sequence[int], *, images: Sequence[PlacedImage] = ()) -> None:
        """Writes tokens that the model did not sample: tool results, user turns, template glue.

        Args:
            token_ids: [R].
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
