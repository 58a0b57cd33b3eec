"""Starts `treadle serve` as users do."""

import os
import subprocess
import sys
from pathlib import Path

from treadle.trainer.launch.process import child_python_path

KEY = "tml-of-a-test"


class ServeProcess:
    """A running service; clients are given its `base_url`."""

    def __init__(self, directory: Path, *settings: str, model: str = "demo:calculator") -> None:
        arguments = (model, "--address", "127.0.0.1:0", "--dir", directory)
        threads = ("rollout.threads=1", "launch.policy_threads=1")
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / "serve.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "treadle.serve", *arguments, *threads, *settings],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": child_python_path(), "TINKER_API_KEY": KEY},
            )
        assert self.process.stdout is not None
        lines = ""
        for line in self.process.stdout:
            lines += line
            if "TINKER_API_KEY" in line:
                break
        self.base_url = lines.partition("TINKER_BASE_URL=")[2].split()[0]
