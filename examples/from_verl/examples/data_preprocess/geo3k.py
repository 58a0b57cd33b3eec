"""Geometry3K with its drawings: `treadle data geo3k`.

It writes to ~/data/geo3k; `--local_dir DIR` names another directory, `--local_dataset_path DIR`
a copy of the published files.
"""

import sys
from pathlib import Path

from treadle.trainer.main import main

if __name__ == "__main__":
    written = Path.home() / "data/geo3k"
    sys.exit(main(["data", "geo3k", "--output", str(written), *sys.argv[1:]]))
