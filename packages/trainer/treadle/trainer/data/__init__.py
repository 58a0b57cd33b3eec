"""Turns dataset files into the tasks of a step.

`read_rows` reads and checks files, `check_rows` rejects rows that need something unavailable,
`make_prompts` prepares the rows at start, `DataOrder` chooses the rows of a step, and
`Prompt.tasks` makes the tasks of a row.
"""

from treadle.trainer.data.dataset import REQUIRED_COLUMNS, read_rows
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.order import DataOrder, MixedOrder
from treadle.trainer.data.prompts import Prompt, PromptSet, make_prompts
from treadle.trainer.data.row import Row
from treadle.trainer.data.rules import PromptRules, check_each, check_row_loops, check_rows

__all__ = [
    "REQUIRED_COLUMNS",
    "DataError",
    "DataOrder",
    "MixedOrder",
    "Prompt",
    "PromptRules",
    "PromptSet",
    "Row",
    "check_each",
    "check_row_loops",
    "check_rows",
    "make_prompts",
    "read_rows",
]
