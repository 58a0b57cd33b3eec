"""GSM8K for the tool agent, with the column agent_name: `treadle data gsm8k`.

It writes to ~/data/gsm8k; `--local_dir DIR` names another directory, `--local_dataset_path DIR`
a copy of the published files.
"""

import sys
from pathlib import Path

from treadle.trainer.main import main

if __name__ == "__main__":
    written = Path.home() / "data/gsm8k"
    sys.exit(main(["data", "gsm8k", "--output", str(written), *sys.argv[1:]]))
