"""Retokenization drift: where a sample's ids differ from the template's ids for its messages.

A loop that keeps text and renders it again would train on ids that were never sampled. The ledger
keeps the sampled ids, so drift does not reach the loss. It is measured in every run all the same:
a few drifting turns are normal (a model may split a word, space its JSON or leave out a newline in
its own way); many mean that parser, template and model do not fit together.

Both sides are split into turns, each up to and including an end-of-turn id, and compared turn by
turn, so that one difference counts once. A turn drifts as

- *sampled* if its first difference is in what the model wrote;
- *observed* if it is in tokens that the renderer wrote, if the template leaves out the reasoning of
  a turn that is past, or if a boundary differs, such as the id that ended the turn.

Pure. Each sample is rendered once when its trajectory ends, and what the model wrote of it is
tokenised; all of it if the renderer is no `RerenderingRenderer`. The event loop waits meanwhile, so
at most `MAX_TOKENS` per trajectory are measured: an agent that edits its history with each request
has a sample per request.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

from treadle.agent_loop.errors import RenderError
from treadle.agent_loop.tokens.renderer import ChatRenderer, RerenderingRenderer
from treadle.agent_loop.tokens.transcript import Origin, Tokens
from treadle.agent_loop.trajectory import Finding
from treadle.agent_loop.types import Message, ToolSpec
from treadle.tracing import Metric, Reduce

_CONTEXT = 8

MAX_TOKENS: Final = 65_536
"""Maximum number of ids measured per trajectory, in the order of its samples; the first sample is
always measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPoint:
    """The first difference of a turn.

    Attributes:
        sample: Index of the sample in the trajectory.
        turn: Index of the turn in the sample; a message of any role ends a turn if the template
            marks its end.
        position: Position in the sample of the first id that differs.
        expected: The template's text around it.
        actual: The sample's text around it.
    """

    sample: int
    turn: int
    position: int
    origin: Origin
    expected: str
    actual: str

    def __str__(self) -> str:
        return (
            f"turn {self.turn} of sample {self.sample}, {self.origin.value} id {self.position}: "
            f"the template writes {self.expected!r}, the sample has {self.actual!r}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetokenizationDrift:
    """The drift of a trajectory.

    Attributes:
        num_turns: Number of turns compared, over all samples.
        num_sampled: Number of turns that drift in the model's tokens.
        num_observed: Number of turns that drift in the renderer's tokens.
        num_unknown: Number of samples whose messages the template refuses as a whole.
        num_unmeasured: Number of samples beyond `MAX_TOKENS`.
        first: The first difference in the trajectory.
    """

    num_turns: int = 0
    num_sampled: int = 0
    num_observed: int = 0
    num_unknown: int = 0
    num_unmeasured: int = 0
    first: DriftPoint | None = None

    @property
    def num_drifted(self) -> int:
        """Number of turns that drift, of either kind."""
        return self.num_sampled + self.num_observed

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The first difference, as a finding of the trajectory."""
        return () if self.first is None else (Finding(kind="drift", text=str(self.first)),)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """The counts, as metrics of the trajectory."""
        return (
            Metric("drift/turns", self.num_turns, Reduce.SUM),
            Metric("drift/sampled", self.num_sampled, Reduce.SUM),
            Metric("drift/observed", self.num_observed, Reduce.SUM),
            Metric("drift/unknown_samples", self.num_unknown, Reduce.SUM),
            Metric("drift/unmeasured_samples", self.num_unmeasured, Reduce.SUM),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSample:
    """A sample and the messages that it represents.

    Attributes:
        messages: Messages of the sample; the last one is the assistant's.
        tools: Tools that were shown to the model.
    """

    tokens: Tokens
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    written: tuple[tuple[int, int], ...] = ()


def measure_drift(samples: Iterable[RecordedSample], renderer: ChatRenderer) -> RetokenizationDrift:
    """Compares each sample with the renderer's own rendering of its messages. Never raises."""
    turns = unknown = unmeasured = seen = 0
    origins: Counter[bool] = Counter()
    first: DriftPoint | None = None
    ends = frozenset(renderer.stop_token_ids)
    for index, sample in enumerate(samples):
        actual = tuple(sample.tokens.ids)  # one conversion for several comparisons
        seen += len(actual)
        if index and seen > MAX_TOKENS:
            unmeasured += 1
            continue
        try:
            expected = _rendered(sample, actual, renderer)
        except RenderError:
            unknown += 1
            continue
        turns += len(_turns(actual, ends))
        if expected[: len(actual)] == actual:  # the rendering continues with the next header
            continue
        for turn, ours, theirs in _differences(actual, expected, ends):
            origin = _origin(sample.tokens, ours.start)
            if origin is Origin.SAMPLED and (
                _only_ends_differ(sample.tokens, actual, expected, ours.start, theirs.start, ends)
                or _leaves_out_reasoning(sample, renderer, actual[ours], expected[theirs])
            ):
                origin = Origin.OBSERVED
            origins[origin is Origin.SAMPLED] += 1
            if first is None:
                first = DriftPoint(
                    sample=index,
                    turn=turn,
                    position=ours.start,
                    origin=origin,
                    expected=renderer.decode(_around(expected, theirs.start)),
                    actual=renderer.decode(_around(actual, ours.start)),
                )
    return RetokenizationDrift(
        num_turns=turns,
        num_sampled=origins[True],
        num_observed=origins[False],
        num_unknown=unknown,
        num_unmeasured=unmeasured,
        first=first,
    )


def _rendered(
    sample: RecordedSample, ids: Sequence[int], renderer: ChatRenderer
) -> tuple[int, ...]:
    messages, tools = sample.messages, sample.tools
    # Not `isinstance`, which asks a protocol for each of its members.
    if not hasattr(renderer, "render_again"):
        return renderer.render(messages, tools=tools).ids
    again = cast(RerenderingRenderer, renderer)
    return again.render_again(messages, tools=tools, ids=ids, written=sample.written).ids


def _differences(
    actual: Sequence[int], expected: Sequence[int], ends: Container[int]
) -> Iterator[tuple[int, slice, slice]]:
    """Yields each turn that differs, and on both sides what follows its first difference."""
    theirs = _turns(expected, ends)
    for turn, (start, stop) in enumerate(_turns(actual, ends)):
        their_start, their_stop = theirs[turn] if turn < len(theirs) else (len(expected),) * 2
        if actual[stop - 1] not in ends:  # the last turn was cut
            their_stop = min(their_stop, their_start + stop - start)
        if actual[start:stop] == expected[their_start:their_stop]:
            continue
        pairs = zip(actual[start:stop], expected[their_start:their_stop], strict=False)
        same = next(
            (place for place, (a, b) in enumerate(pairs) if a != b),
            min(stop - start, their_stop - their_start),
        )
        first = min(start + same, stop - 1)
        yield turn, slice(first, stop), slice(their_start + same, their_stop)


def _turns(ids: Sequence[int], ends: Container[int]) -> list[tuple[int, int]]:
    """Returns the start and the end of each turn; ends in a row are one."""
    places = [place for place, token in enumerate(ids) if token in ends]
    stops = [p + 1 for p in places if p + 1 == len(ids) or ids[p + 1] not in ends]
    if not stops or stops[-1] < len(ids):
        stops.append(len(ids))
    return list(zip([0, *stops], stops, strict=False))


def _only_ends_differ(
    tokens: Tokens,
    actual: Sequence[int],
    expected: Sequence[int],
    ours: int,
    theirs: int,
    ends: Container[int],
) -> bool:
    """Returns whether a completion ended, with another id, where the template ends the turn."""
    if not any(ours + 1 == span.stop for span in tokens.spans) or theirs >= len(expected):
        return False
    following = actual[ours + 1 : ours + 4]
    # It stands in the place of the template's end, or before one, which the renderer wrote if
    # anything followed.
    replaces = actual[ours] in ends and following == expected[theirs + 1 : theirs + 4]
    before = expected[theirs] in ends and following == expected[theirs : theirs + len(following)]
    return (replaces and bool(following)) or before


def _leaves_out_reasoning(
    sample: RecordedSample, renderer: ChatRenderer, ours: Sequence[int], theirs: Sequence[int]
) -> bool:
    """Returns whether the template has the rest of a turn without the reasoning before it."""
    size = len(ours) - len(theirs)
    if size <= 0 or ours[size:] != theirs:
        return False
    left_out = renderer.decode(ours[:size])
    thoughts = ((message.reasoning or "").strip() for message in sample.messages)
    return any(thought and thought in left_out for thought in thoughts)


def _origin(tokens: Tokens, position: int) -> Origin:
    return next(span.origin for span in tokens.spans if position < span.stop)


def _around(ids: Sequence[int], position: int) -> Sequence[int]:
    return ids[max(0, position - _CONTEXT) : position + _CONTEXT]
