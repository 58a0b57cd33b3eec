"""The question bank: arithmetic word problems whose answers are known by construction.

Invariant: the *unordered* operand pairs of the training split and of the held-out split are
disjoint, for every template, so a held-out question is never a reworded training question
(``a + b`` and ``b + a`` share a pair). Everything is a pure function of its seeds.

Each template also carries a ``tool_rate``: the share of the warm start's *demonstrations* that call
the calculator on that wording (the rest guess a number). GRPO never sees it; it gives the
warm-started model a habit to unlearn.

Example:
    >>> rng = random.Random(7)
    >>> question = sample_question(rng, Split.TRAIN)
    >>> question.answer == str(eval(question.expression))
    True
"""

import enum
import operator
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

SYSTEM_PROMPT: Final = "Solve the problem. End with #### <answer>."
"""Tells the model the answer format that the strict GSM8K reward reads."""

DATA_SOURCE: Final = "treadle/calculator"

OPERAND_MIN: Final = 2
OPERAND_MAX: Final = 99

_HELD_OUT_FRACTION: Final = 0.1
_SPLIT_SEED: Final = 20261121

_OPERATORS: Final[Mapping[str, Callable[[int, int], int]]] = MappingProxyType(
    {"+": operator.add, "-": operator.sub, "*": operator.mul}
)


class Split(enum.StrEnum):
    """Which operand pairs a question may use."""

    TRAIN = "train"
    VALIDATION = "val"


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """One wording of one operation.

    Attributes:
        text: Format string with ``{a}`` and ``{b}``.
        symbol: ``+``, ``-`` or ``*``; with ``-`` the larger operand is ``a``.
        tool_rate: Share of demonstrations, in [0, 1], that call the calculator on this wording.
    """

    text: str
    symbol: str
    tool_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A rendered template with its ground truth.

    Attributes:
        text: What the user asks.
        expression: The calculator call that answers it, for example ``37*48``.
        answer: The value of ``expression`` as a decimal integer.
        template: Index into ``TEMPLATES``.
    """

    text: str
    expression: str
    answer: str
    template: int


_EAGER: Final = 0.8
_SHY: Final = 0.2

TEMPLATES: Final[tuple[Template, ...]] = (
    Template(text="What is {a} + {b}?", symbol="+", tool_rate=_EAGER),
    Template(
        text="Tom has {a} apples and buys {b} more. How many apples does he have?",
        symbol="+",
        tool_rate=_SHY,
    ),
    Template(
        text="A train carries {a} people and {b} more get on. How many people are on the train?",
        symbol="+",
        tool_rate=_EAGER,
    ),
    Template(text="Add {a} and {b}.", symbol="+", tool_rate=_SHY),
    Template(text="What is {a} - {b}?", symbol="-", tool_rate=_SHY),
    Template(
        text="Anna has {a} books and gives away {b}. How many books are left?",
        symbol="-",
        tool_rate=_EAGER,
    ),
    Template(
        text="There are {a} birds on a roof and {b} fly off. How many birds stay?",
        symbol="-",
        tool_rate=_SHY,
    ),
    Template(text="Take {b} from {a}.", symbol="-", tool_rate=_EAGER),
    Template(text="What is {a} * {b}?", symbol="*", tool_rate=_EAGER),
    Template(
        text="There are {a} boxes with {b} pens each. How many pens are there?",
        symbol="*",
        tool_rate=_SHY,
    ),
    Template(
        text="A ticket costs {a} coins. What do {b} tickets cost?",
        symbol="*",
        tool_rate=_EAGER,
    ),
    Template(text="Multiply {a} by {b}.", symbol="*", tool_rate=_SHY),
)
"""Four wordings per operation, half of them eager to use the tool."""


def _split_pairs() -> Mapping[Split, tuple[tuple[int, int], ...]]:
    pairs = [
        (low, high)
        for low in range(OPERAND_MIN, OPERAND_MAX + 1)
        for high in range(low, OPERAND_MAX + 1)
    ]
    random.Random(_SPLIT_SEED).shuffle(pairs)
    num_held_out = round(len(pairs) * _HELD_OUT_FRACTION)
    return MappingProxyType(
        {
            Split.TRAIN: tuple(pairs[num_held_out:]),
            Split.VALIDATION: tuple(pairs[:num_held_out]),
        }
    )


PAIRS: Final = _split_pairs()
"""Unordered operand pairs ``(low, high)`` of each split; the two sets are disjoint."""


def make_question(template: int, a: int, b: int) -> Question:
    """Fills a template; the ground truth is computed, never parsed.

    Args:
        template: Index into ``TEMPLATES``.
        a: First operand.
        b: Second operand; swapped with ``a`` where a subtraction would go below zero.

    Returns:
        The question.
    """
    wording = TEMPLATES[template]
    if wording.symbol == "-" and b > a:
        a, b = b, a
    return Question(
        text=wording.text.format(a=a, b=b),
        expression=f"{a}{wording.symbol}{b}",
        answer=str(_OPERATORS[wording.symbol](a, b)),
        template=template,
    )


def sample_question(rng: random.Random, split: Split, *, template: int | None = None) -> Question:
    """Draws a question uniformly over templates (or of one template) and the split's pairs."""
    if template is None:
        template = rng.randrange(len(TEMPLATES))
    pair = rng.choice(PAIRS[split])
    a, b = pair if rng.random() < 0.5 else pair[::-1]
    return make_question(template, a, b)


def guess_answer(question: Question) -> str:
    """Returns what is said without thinking: the first operand.

    It is never the answer, as no operand is neutral for its operation. Being a copy, it costs the
    warm-started model nothing to predict, so imitating guesses does not blunt the copying of
    operands into tool calls, which guesses of random digits did.
    """
    return question.expression.partition(TEMPLATES[question.template].symbol)[0]


def chat_messages(question: Question) -> list[dict[str, str]]:
    """Returns the prompt of a question: system and user message, as the dataset stores them."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.text},
    ]


def dataset_rows(split: Split, num_rows: int, *, seed: int) -> Iterator[dict[str, object]]:
    """Rows in verl's format, the templates taking turns so that every one is equally frequent.

    Args:
        split: Which operand pairs to use, and the value of ``extra_info.split``.
        num_rows: How many rows to make.
        seed: Seeds the operands.

    Yields:
        One row per question with ``data_source``, ``agent_name``, ``prompt``, ``ability``,
        ``reward_model`` and ``extra_info``.
    """
    rng = random.Random(seed)
    for index in range(num_rows):
        question = sample_question(rng, split, template=index % len(TEMPLATES))
        yield {
            "data_source": DATA_SOURCE,
            "agent_name": "tool_agent",
            "prompt": chat_messages(question),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"index": index, "split": split.value},
        }
