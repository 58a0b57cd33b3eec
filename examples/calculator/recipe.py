"""The recipe of the calculator demo."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from calculator.demonstrations import answered_with_tool, drill, habit, tool_use
from calculator.questions import (
    SYSTEM_PROMPT,
    TEMPLATES,
    Split,
    dataset_rows,
    sample_question,
)
from treadle.agent_loop import ToolSpec
from treadle.tools import load_catalogue
from treadle.trainer import demo
from treadle.trainer.sft import Demonstration
from warm_start.recipe import Recipe, Stage

__all__ = ["CALCULATOR", "CATALOGUE", "NUM_TRAIN_ROWS", "NUM_VAL_ROWS"]

CATALOGUE: Final = Path(demo.__file__).parent / "calculator" / "tools.yaml"

NUM_TRAIN_ROWS: Final = 1200
NUM_VAL_ROWS: Final = 96
_TRAIN_SEED: Final = 1
_VAL_SEED: Final = 2


def _held_out(rng: random.Random, tool: ToolSpec) -> Demonstration:
    return answered_with_tool(sample_question(rng, Split.VALIDATION), tool)


def _rows() -> Mapping[str, Iterable[Mapping[str, object]]]:
    return {
        "train.jsonl": dataset_rows(Split.TRAIN, NUM_TRAIN_ROWS, seed=_TRAIN_SEED),
        "val.jsonl": dataset_rows(Split.VALIDATION, NUM_VAL_ROWS, seed=_VAL_SEED),
    }


CALCULATOR: Final = Recipe(
    tool=load_catalogue(CATALOGUE)["calculator"].spec,
    chat_texts=(
        SYSTEM_PROMPT,
        "system\nuser\nassistant\ntool\n#### 12",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>',
        "<tool_response>\n408\n</tool_response>",
        *(template.text.format(a=12, b=34) for template in TEMPLATES),
    ),
    stages=(
        Stage(name="copy", demonstrate=drill, num_steps=320, batch_size=64),
        Stage(name="call", demonstrate=tool_use, num_steps=160, batch_size=32),
        Stage(name="habit", demonstrate=habit, num_steps=280, batch_size=32),
    ),
    held_out=_held_out,
    rows=_rows,
)
