"""Geometry3K as it is published -> training rows: `treadle data geo3k` as a script.

    python examples/geo3k/preprocess.py --output examples/geo3k/data

Downloads `hiyouga/geometry3k` from the Hugging Face Hub, or reads its files in `--from`, and writes
`train` and `test`; `treadle.trainer.prepare.geometry3k` makes the rows.
"""

import sys
from collections.abc import Sequence

from treadle.trainer.main import main as treadle


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts both splits; returns 0 on success."""
    return treadle(["data", "geo3k", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
