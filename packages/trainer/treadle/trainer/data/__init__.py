"""From dataset files to the tasks of a step.

`read_rows` reads and checks files, `make_prompts` decides everything about their rows at start,
`DataOrder` says which rows a step trains on, `Prompt.tasks` makes the attempts.
"""

from treadle.trainer.data.dataset import REQUIRED_COLUMNS, Row, read_rows
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.order import DataOrder
from treadle.trainer.data.prompts import Prompt, PromptRules, PromptSet, make_prompts

__all__ = [
    "REQUIRED_COLUMNS",
    "DataError",
    "DataOrder",
    "Prompt",
    "PromptRules",
    "PromptSet",
    "Row",
    "make_prompts",
    "read_rows",
]
