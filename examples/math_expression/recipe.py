"""The recipe of the math expression demo."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from math_expression.dataset import dataset_rows
from math_expression.demonstrations import (
    SYSTEM_PROMPT,
    computed,
    drill,
    habit,
    sample_split,
    tool_use,
)
from treadle.agent_loop import ToolSpec
from treadle.tools import load_catalogue
from treadle.trainer import demo
from treadle.trainer.sft import Demonstration
from warm_start.recipe import Recipe, Stage

__all__ = ["CATALOGUE", "MATH_EXPRESSION", "NUM_TRAIN_ROWS", "NUM_VAL_ROWS"]

CATALOGUE: Final = Path(demo.__file__).parent / "math_expression" / "tools.yaml"

NUM_TRAIN_ROWS: Final = 1200
NUM_VAL_ROWS: Final = 96
_ROWS_SEED: Final = 1


def _held_out(rng: random.Random, tool: ToolSpec) -> Demonstration:
    return computed(sample_split(rng, held_out=True), tool)


def _rows() -> Mapping[str, Iterable[Mapping[str, object]]]:
    train, val = dataset_rows(num_train=NUM_TRAIN_ROWS, num_val=NUM_VAL_ROWS, seed=_ROWS_SEED)
    return {"train.jsonl": train, "val.jsonl": val}


MATH_EXPRESSION: Final = Recipe(
    tool=load_catalogue(CATALOGUE)["calculate"].spec,
    chat_texts=(
        SYSTEM_PROMPT,
        "system\nuser\nassistant\ntool\n#### 12\n#### -12",
        "Compute 1 + 2 - 3 * 4 @ 5.",
        "Compute (1 - 2) * 3.",
        "Compute 1 @ (2 + 3).",
        '<tool_call>\n{"name": "calculate", "arguments": {"a": 1, "b": -2, "operand": "@"}}\n'
        "</tool_call>",
        '"operand": "+"}}\n "operand": "-"}}\n "operand": "*"}}\n "operand": "@"}}\n',
        "<tool_response>\n408\n</tool_response>",
    ),
    stages=(
        Stage(name="copy", demonstrate=drill, num_steps=400, batch_size=64),
        Stage(name="call", demonstrate=tool_use, num_steps=100, batch_size=32),
        Stage(name="habit", demonstrate=habit, num_steps=180, batch_size=32),
    ),
    held_out=_held_out,
    rows=_rows,
)
