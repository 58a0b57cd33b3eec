"""The recipe of a demo: what its tokenizer, its data and its warm-started model are made from.

Invariant: with one recipe, one seed and one number of threads, one machine makes the same files
again.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from treadle.agent_loop import ToolSpec
from treadle.trainer.sft import Demonstration

__all__ = ["Demonstrate", "Recipe", "Stage"]

Demonstrate: TypeAlias = Callable[[random.Random, ToolSpec], Demonstration]
"""Makes one demonstration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Some steps on one kind of demonstration.

    Attributes:
        name: For the log.
        demonstrate: Makes one demonstration.
        num_steps: Optimizer steps.
        batch_size: Demonstrations per step.
    """

    name: str
    demonstrate: Demonstrate
    num_steps: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A demo, as far as its making goes.

    Attributes:
        tool: What the model is told about, in every prompt.
        chat_texts: What the demo's chats are made of besides the template and the tool's schema;
            the tokenizer writes each of their words as one token.
        stages: What the model is trained on, one after the other.
        held_out: Draws a question that training does not contain, with the conversation that a
            rollout of full reward would be.
        rows: Makes the rows of each data file, by the file's name.
    """

    tool: ToolSpec
    chat_texts: tuple[str, ...]
    stages: tuple[Stage, ...]
    held_out: Demonstrate
    rows: Callable[[], Mapping[str, Iterable[Mapping[str, object]]]]
