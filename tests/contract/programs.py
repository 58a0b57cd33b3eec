"""Programs of a release and of today, as processes on the libraries of today.

Invariant: a process of a release imports no package of ours but those of its wheels. They are
unpacked into a folder that comes first on its path, and nothing else on the path holds any.
"""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract import client_program
from treadle.trainer.launch.process import child_python_path


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of one version.

    Attributes:
        path: What its processes have as PYTHONPATH.
    """

    path: tuple[str, ...]

    @classmethod
    def of_today(cls) -> "Programs":
        """Returns the programs that this process would run."""
        return cls(tuple(child_python_path().split(os.pathsep)))

    @classmethod
    def of_release(cls, release: Path, folder: Path) -> "Programs":
        """Returns the programs of a release, whose wheels are unpacked into `folder`."""
        for wheel in release.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        libraries = [p for p in cls.of_today().path if not Path(p, "treadle").is_dir()]
        return cls((str(folder), *libraries))

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Returns the command that runs Python with `arguments` in this version's environment."""
        # Safe path: neither the working directory nor a script's folder is on the path. Pants adds
        # today's sources by two variables of the environment. The options that this pytest was
        # given are not for that of the conformance kit.
        hidden = ("PYTEST_ADDOPTS", "PEX_EXTRA_SYS_PATH", "__PEX_EXTRA_SYS_PATH__")
        unset = [f"--unset={name}" for name in hidden]
        settings = (f"PYTHONPATH={os.pathsep.join(self.path)}", "PYTHONSAFEPATH=1")
        return ("env", *unset, *settings, sys.executable, *arguments)

    @property
    def server(self) -> tuple[str, ...]:
        """The command that starts a rollout server."""
        return self.command("-m", "treadle.rollout_server")

    def run(self, *arguments: str) -> str:
        """Runs Python to its end, which must be a success; returns its standard output."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout

    def sample_on(self, address: str) -> dict[str, Any]:
        """Runs `client_program`; returns what it printed."""
        printed: dict[str, Any] = json.loads(
            self.run(os.path.abspath(client_program.__file__), address)
        )
        return printed
