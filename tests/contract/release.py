"""Cut a release: build every package, and keep what later versions are tested against.

`./pants run tests/contract/release.py -- VERSION`, from the root of the repository, at the commit
that gave the packages this version (CONTRIBUTING.md). It asks the package index for the build
tools, and makes two folders:

- dist/VERSION: every wheel and source distribution, to be uploaded. Building the same commit again
  gives the same bytes.
- tests/contract/released/VERSION: the wheels whose programs talk to those of other versions
  (`KEPT`), the contract as `contract.binpb`, and SHA256SUMS of all that was built. It is committed
  and never changed again.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from itertools import chain
from pathlib import Path

import set_version

from contract.descriptors import current_set

# The trainer's wheel holds megabytes of demos. What it says to a server, the conformance kit says.
KEPT = ("agent_loop", "conformance", "proto", "rollout_server", "tracing")


def why_not(root: Path, version: str) -> list[str]:
    """Returns all that keeps a version from being released from the tree at `root`."""
    problems = []
    if (root / "tests/contract/released" / version).exists():
        problems.append(f"{version} is released already: a release is never written again")
    if changed := _git(root, "status", "--porcelain").splitlines():
        problems.append(
            f"{len(changed)} files are not as committed, {changed[0].split()[-1]} first"
        )
    for folder in set_version.projects(root):
        name = folder.name
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["version"] != version:
            problems.append(f"{name} has version {project['version']} in its pyproject.toml")
        extras = project.get("optional-dependencies", {}).values()
        for line in chain(project.get("dependencies", ()), *extras):
            if line.startswith("treadle-") and not line.endswith(f"~={version}"):
                problems.append(f"{name} requires {line}, not ~={version}")
        heading = rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$"
        if not re.search(heading, (folder / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE):
            problems.append(f"{name}'s CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'")
    return problems


def build(root: Path, out: Path) -> None:
    """Builds the wheel and the source distribution of every package as the last commit has it."""
    hidden = ("PEX_", "PYTHON")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    env["SOURCE_DATE_EPOCH"] = _git(root, "log", "-1", "--format=%ct").strip()
    with tempfile.TemporaryDirectory() as temporary:
        tree, venv = Path(temporary, "tree"), Path(temporary, "venv")
        # What git ignores but a folder holds must not get into a wheel.
        archive = Path(temporary, "tree.tar")
        _git(root, "archive", "--output", str(archive), "HEAD")
        shutil.unpack_archive(archive, tree)
        subprocess.run([sys.executable, "-m", "venv", venv], env=env, check=True)
        subprocess.run([venv / "bin/pip", "install", "-q", "build"], env=env, check=True)
        for folder in set_version.projects(tree):
            subprocess.run(
                [venv / "bin/python", "-m", "build", "-o", out, folder],
                env=env, check=True, stdout=subprocess.DEVNULL,
            )  # fmt: skip


def keep(built: Path, target: Path, commit: str) -> None:
    """Writes what of a release is committed."""
    target.mkdir(parents=True)
    contract = current_set().SerializeToString(deterministic=True)
    (target / "contract.binpb").write_bytes(contract)
    digests = {"contract.binpb": hashlib.sha256(contract).hexdigest()}
    for path in sorted(built.iterdir()):
        digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
        if path.suffix == ".whl" and path.name.split("-")[0].removeprefix("treadle_") in KEPT:
            shutil.copy(path, target)
    lines = [f"# built from commit {commit}", *(f"{d}  {name}" for name, d in digests.items())]
    (target / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Builds and keeps a release, or exits with all that is in its way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="MAJOR.MINOR.PATCH")
    version: str = parser.parse_args().version
    root = Path.cwd()
    if not (root / "proto/pyproject.toml").is_file():
        raise SystemExit("proto/pyproject.toml not found: run this from the root of the repository")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"{version!r} is not MAJOR.MINOR.PATCH")
    if problems := why_not(root, version):
        raise SystemExit("\n  ".join([f"{version} cannot be released:", *problems]))
    built, target = root / "dist" / version, root / "tests/contract/released" / version
    shutil.rmtree(built, ignore_errors=True)
    build(root, built)
    keep(built, target, _git(root, "rev-parse", "HEAD").strip())
    print(f"upload {built}\ncommit {target}")


def _git(root: Path, *args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=root, capture_output=True, check=True, text=True
    ).stdout


if __name__ == "__main__":
    main()
