"""What a test needs that installs Treadle as a stranger does: sources, a page, an environment."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pants_env
import pytest

ROOT = Path(__file__).parents[2]
# Below it: the folders of the packages, as the page names them.
PROJECTS = ("proto", *(f"packages/{name}" for name in ("tracing", "agent_loop", "tools")))
PROJECTS += tuple(
    f"packages/{name}" for name in ("policy", "rollout_server", "conformance", "trainer", "serve")
)
PYTHONS = ("3.11", "3.12", "3.13")
# A program of someone else, in one file.
APP = """\
import treadle.agent_loop.rpc
from treadle.agent_loop import AgentTask
from treadle.agent_loop.testing import ScriptedGenerator

print(AgentTask.__name__, ScriptedGenerator.__name__)
"""
APP_PRINTS = "AgentTask ScriptedGenerator"


def code_blocks(page: str, heading: str, language: str) -> list[str]:
    """Returns the code in one language below a heading of a page of the repository."""
    text = (ROOT / page).read_text()
    (section,) = re.findall(
        rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL
    )
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def make_repository(folder: Path) -> str:
    """Commits what the packages are built from, tests included, to git; returns the URL."""
    ignore = shutil.ignore_patterns("__pycache__", "dist")
    for name in ("packages", "proto"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    identity = ("-c", "user.name=test", "-c", "user.email=test@treadle.invalid")
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "sources"]):
        run(["git", *command], cwd=folder)
    # pip before 24.1 takes no URL without a host.
    return f"file://localhost{folder}"


def environment(*folders: Path) -> dict[str, str]:
    """Returns the environment of a user: nothing of the test's Python, `folders` first in PATH.

    uv looks where pip is configured to look, and finds pyenv's interpreters.
    """
    hidden = ("PEX_", "PYTEST_", "PYTHON", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    settings = pants_env.pip_settings()
    uv = {
        "UV_DEFAULT_INDEX": settings.get("index-url"),
        "UV_INDEX": " ".join(pants_env.values(settings, "extra-index-url")),
        "UV_FIND_LINKS": ",".join(pants_env.values(settings, "find-links")),
        "UV_NO_INDEX": settings.get("no-index"),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip's
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_SYSTEM_CERTS": "1",
    }
    # pyenv's shims answer only for the versions that it is set to.
    path = os.pathsep.join(map(str, [*folders, *_pyenv_programs(), clean["PATH"]]))
    return clean | {name: value for name, value in uv.items() if value} | {"PATH": path}


@cache
def _pyenv_programs() -> tuple[Path, ...]:
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    return tuple(path for minor in PYTHONS for path in sorted(versions.glob(f"{minor}.*/bin")))


def run(command: list[str | Path], *, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Runs a command that must succeed; returns its standard output."""
    done = subprocess.run(
        command, cwd=cwd, env=env or environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def make_programs(folder: Path) -> Path:
    """Installs uv and build as the package index has them; returns the folder of their commands."""
    run([sys.executable, "-m", "venv", folder], cwd=folder.parent)
    run([folder / "bin" / "pip", "install", "-q", "build", "uv"], cwd=folder.parent)
    return folder / "bin"


def make_venv(folder: Path, programs: Path, python: str = "3.11", *options: str) -> Path:
    """Makes a virtual environment by uv, or skips the test where that Python is not installed.

    Returns:
        The folder of its commands.
    """
    uv, env = programs / "uv", environment(programs)
    find = subprocess.run(
        [uv, "python", "find", python], cwd=folder.parent, env=env, capture_output=True, check=False
    )
    if find.returncode:
        pytest.skip(f"no Python {python} on this machine")
    run([uv, "venv", "-q", "--python", python, *options, folder], cwd=folder.parent, env=env)
    return folder / "bin"


def install_torch(bin_folder: Path, programs: Path) -> dict[str, str]:
    """Installs the locks' torch as a CPU build, or skips the test where the index has none.

    Returns:
        The environment variables with which uv installs into that virtual environment.
    """
    lock = (ROOT / "3rdparty/python/default-cpu.lock.txt").read_text()
    (torch,) = re.findall(r"^torch==[\d.]+", lock, re.MULTILINE)
    env = environment(bin_folder, programs) | {"VIRTUAL_ENV": str(bin_folder.parent)}
    install: list[str | Path] = [programs / "uv", "pip", "install", "-q", f"{torch}+cpu"]
    if subprocess.run(install, cwd=bin_folder, env=env, check=False).returncode:
        pytest.skip(f"the package index has no CPU build of {torch} for {bin_folder.parent}")
    return env
