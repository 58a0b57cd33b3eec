"""GSM8K for a single turn: `treadle data gsm8k_single_turn`.

It writes to ~/data/gsm8k; `--local_dir DIR` names another directory, `--local_dataset_path DIR`
a copy of the published files.
"""

import sys
from pathlib import Path

from treadle.trainer.main import main

if __name__ == "__main__":
    written = Path.home() / "data/gsm8k"
    sys.exit(main(["data", "gsm8k_single_turn", "--output", str(written), *sys.argv[1:]]))
