"""The folder that the seeds' commands run in, and what they print."""

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from treadle.trainer.launch.process import child_python_path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "from_verl"
__all__ = ["COMMANDS", "Answer", "Project"]

COMMANDS = Path(__file__).parent / "commands"
# What the seeds' commands call and a test cannot: they install, and need a daemon or a cluster.
_STUBS = ("pip", "docker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command printed.

    Attributes:
        status: Its exit status.
        plan: Lines of the plan, by their first words.
        notes: What was accepted without effect.
        said: Everything that it printed.
    """

    status: int
    plan: dict[str, str]
    notes: list[str]
    said: str


class Project:
    """A copy of examples/from_verl, with a home, a Hub and the programs that the seeds call."""

    def __init__(self, folder: Path, hub: str) -> None:
        self.folder = Path(shutil.copytree(RECIPES, folder / "project"))
        self.home, programs = folder / "home", folder / "bin"
        self.home.mkdir()
        programs.mkdir()
        python = f'PYTHONPATH="{child_python_path()}" exec {sys.executable}'
        for name, start in {
            **dict.fromkeys(("python", "python3"), python),
            "treadle": f"{python} -m treadle.trainer.main",
            "treadle-rollout-server": f"{python} -m treadle.rollout_server",
            "hf": f"{python} -m huggingface_hub.cli.hf",
            **dict.fromkeys(_STUBS, "true"),
        }.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\n{start} "$@"\n')
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self._environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(self.home),
            "HF_ENDPOINT": hub,
            "HF_HUB_DISABLE_XET": "1",
            "SGLANG_SERVER": str(programs / "treadle-rollout-server"),
            # They are read, and nothing is sent: a dry run only asks whether Weave answers.
            "WANDB_API_KEY": "0" * 40,
            "WF_TRACE_SERVER_URL": hub,
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlruns.db",
            "CUDA_VISIBLE_DEVICES": "",  # plans are made as on a machine without GPUs
            "OMP_NUM_THREADS": "1",
            "LANG": "C.UTF-8",
            **{k: v for k, v in os.environ.items() if k in ("LD_LIBRARY_PATH", "TMPDIR")},
        }
        self.server = str(programs / "treadle-rollout-server")

    def bash(self, text: str, *arguments: str) -> Answer:
        """Runs a script, with arguments as its `$@`."""
        done = subprocess.run(
            ("bash", "-c", text, "script", *arguments),
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        lines = done.stdout.splitlines()
        plan = {}
        for line in lines:
            what, gap, which = line.strip().partition("  ")
            if gap and not line.startswith("+"):
                plan[what] = which.strip()
        notes = [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]
        return Answer(status=done.returncode, plan=plan, notes=notes, said=done.stdout)
