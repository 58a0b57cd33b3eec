"""ReTool's demonstrations as conversations with tool calls: `treadle data retool_sft`.

It reads ./ReTool-SFT, where `hf download JoeYing/ReTool-SFT --repo-type dataset --local-dir
./ReTool-SFT` puts them, and the Hugging Face Hub where that directory is missing.
"""

import sys
from pathlib import Path

from treadle.trainer.main import main

if __name__ == "__main__":
    downloaded = Path("ReTool-SFT")
    copy = ["--from", str(downloaded)] if downloaded.is_dir() else []
    written = "dataset/wuxibin/ReTool-SFT/data"
    sys.exit(main(["data", "retool_sft", "--output", written, *copy, *sys.argv[1:]]))
