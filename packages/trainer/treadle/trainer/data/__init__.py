"""From dataset files to the tasks of a step.

`read_rows` reads and checks files, `check_rows` refuses rows that ask for what is not there,
`make_prompts` decides everything about the others at start,
`DataOrder` says which rows a step trains on, `Prompt.tasks` makes the attempts.
"""

from treadle.trainer.data.dataset import REQUIRED_COLUMNS, Row, read_rows
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.order import DataOrder
from treadle.trainer.data.prompts import Prompt, PromptSet, make_prompts
from treadle.trainer.data.rules import PromptRules, check_rows

__all__ = [
    "REQUIRED_COLUMNS",
    "DataError",
    "DataOrder",
    "Prompt",
    "PromptRules",
    "PromptSet",
    "Row",
    "check_rows",
    "make_prompts",
    "read_rows",
]
