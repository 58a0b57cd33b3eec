"""GSM8K as it is published -> training rows for the tool agent: `treadle data gsm8k` as a script.

    python examples/gsm8k_tool_agent/preprocess.py --output examples/gsm8k_tool_agent/data

Downloads `openai/gsm8k` from the Hugging Face Hub, or reads its files in `--from`, and writes
`train` and `test`; `treadle.trainer.prepare.gsm8k` makes the rows.
"""

import sys
from collections.abc import Sequence

from treadle.trainer.main import main as treadle


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts both splits; returns 0 on success."""
    return treadle(["data", "gsm8k", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
