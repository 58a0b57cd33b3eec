"""The loop that fuzzes: Hypothesis draws an input of the corpus and a list of edits.

Hypothesis and not a fuzzer that follows coverage: the tests have it already, it shrinks what falls
to few edits, runs in the process that holds the server, on any platform, and repeats itself from
a seed. What is inside of messages and values is reached by edits that know the format (`mutate`).

Invariant: an input that falls does so again from its file, by itself.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from fuzz.inputs import Input, Part, read_corpus
from fuzz.mutate import Edit, Material, mutate
from fuzz.target import Fell, Target
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

_BATCH = 40
_SMALL = st.integers(min_value=0, max_value=2**16 - 1)
_EDITS = st.lists(
    st.builds(Edit, st.integers(0, 63), st.integers(0, 15), _SMALL, _SMALL, _SMALL),
    min_size=1,
    max_size=6,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of fuzzing a target.

    Attributes:
        inputs: Number of inputs.
        seconds: What they took.
        fallen: The smallest input that fell; None if none did.
        why: What did not hold.
    """

    inputs: int
    seconds: float
    fallen: Input | None = None
    why: str = ""


def give(target: Target, parts: Input) -> None:
    """Gives a target an input; whatever goes wrong is about that input.

    Raises:
        Fell: Something did not hold, or the target died, hung or raised.
    """
    try:
        target.check(parts)
    except Fell:
        raise
    except Exception as error:
        raise Fell(f"{type(error).__name__}: {error}") from error


def replay(target: Target, corpus: Mapping[str, Input]) -> None:
    """Gives a target every input of its corpus as it is.

    Raises:
        Fell: Something did not hold; the message names the file.
    """
    for name, parts in corpus.items():
        try:
            give(target, parts)
        except Fell as error:
            raise Fell(f"{name}: {error}") from error


def fuzz(
    name: str,
    target: Target,
    *,
    seconds: float | None = None,
    inputs: int | None = None,
    first_seed: int = 0,
) -> Outcome:
    """Gives a target mutated inputs, until one falls, the time is over or that many were given.

    Args:
        name: Of the target, whose corpus is mutated.
        target: As entered.
        seconds: How long.
        inputs: How many, at least.
        first_seed: Equal seeds give equal inputs.
    """
    corpus = tuple(read_corpus(name).values())
    material = Material(form=target.form, words=target.words, heads=target.heads, others=corpus)
    begun, given_inputs, number = time.monotonic(), 0, first_seed
    while True:
        fallen, reason = tuple[Part, ...](), ""

        def one(parts: Input, edits: list[Edit]) -> None:
            nonlocal given_inputs, fallen, reason
            given_inputs += 1
            changed = mutate(parts, edits, material)
            try:
                give(target, changed)
            except Fell as error:
                fallen, reason = changed, str(error)
                raise

        try:
            seed(number)(_settings(given(st.sampled_from(corpus), _EDITS)(one)))()
        except (Fell, Flaky, ExceptionGroup):  # The latter two if not every attempt falls.
            smallest, why = reduce(target, fallen, reason)
            return Outcome(
                inputs=given_inputs,
                seconds=time.monotonic() - begun,
                fallen=smallest,
                why=why,
            )
        number += 1
        took = time.monotonic() - begun
        if (seconds is not None and took >= seconds) or (
            inputs is not None and given_inputs >= inputs
        ):
            return Outcome(inputs=given_inputs, seconds=took)


_settings = settings(
    max_examples=_BATCH,
    deadline=None,
    database=None,
    derandomize=False,
    report_multiple_bugs=False,
    verbosity=Verbosity.quiet,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def reduce(target: Target, parts: Input, why: str, *, tries: int = 400) -> tuple[Input, str]:
    """Returns a smaller input that falls for the same kind of reason, and its reason.

    Parts and halves, quarters, ... of bodies are left out as long as it falls.
    """
    kind = why[:20]

    def falls(smaller: Input) -> str | None:
        nonlocal tries
        tries -= 1
        try:
            give(target, smaller)
        except Fell as error:
            return str(error) if str(error)[:20] == kind else None
        return None

    index = 0
    while index < len(parts) and tries > 0:
        if found := falls(parts[:index] + parts[index + 1 :]):
            parts, why = parts[:index] + parts[index + 1 :], found
        else:
            index += 1
    for index, part in enumerate(parts):
        size = len(part.body) // 2
        while size and tries > 0:
            at = 0
            while at < len(parts[index].body) and tries > 0:
                body = parts[index].body
                shorter = Part(part.head, body[:at] + body[at + size :])
                smaller = (*parts[:index], shorter, *parts[index + 1 :])
                if found := falls(smaller):
                    parts, why = smaller, found
                else:
                    at += size
            size //= 2
    return parts, why
