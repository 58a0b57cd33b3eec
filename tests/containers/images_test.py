"""The Dockerfiles, read without a builder: what they copy exists, what they run parses.

An image is built where a builder is at hand (docs/containers.md); what a change of the repository
can break in them is checked here.
"""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
FILES = sorted(FOLDER.glob("*.Dockerfile"))
VARIANTS = ("cpu", "cuda")
KNOWN = frozenset(
    ("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "SHELL", "USER", "WORKDIR")
)
# What a package needs beside itself, as docs/install.md says.
SIBLINGS = {
    "rollout_server": {"proto", "tracing"},
    "tools": {"proto", "tracing", "agent_loop"},
    "policy": {"proto", "tracing", "agent_loop"},
    "trainer": {"proto", "tracing", "agent_loop", "policy", "tools", "rollout_server"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction of a Dockerfile, its continued lines joined."""

    word: str
    rest: str


def instructions(file: Path) -> Sequence[Instruction]:
    """Returns the instructions of a Dockerfile; comments are left out, as builders do."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        found.append(Instruction(word=word, rest=rest.strip()))
    return found


def of(file: Path, word: str) -> list[str]:
    return [each.rest for each in instructions(file) if each.word == word]


def commands(file: Path) -> list[str]:
    """Returns the shell commands of RUN, without the mounts."""
    return [re.sub(r"^(--\S+\s+)+", "", run) for run in of(file, "RUN")]


def ignored(path: Path) -> bool:
    """Returns whether .dockerignore keeps a path of the repository from the builder."""
    kept = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!"):
            kept = kept or path.match(line[1:]) or path.is_relative_to(line[1:])
    return not kept


def test_there_is_an_image_of_the_trainer_and_one_of_each_engine() -> None:
    assert [file.name.partition(".")[0] for file in FILES] == ["sglang", "trainer", "vllm"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_an_image_copies_is_there(file: Path, variant: str) -> None:
    stages: set[str] = set()
    num_copied = 0
    for each in instructions(file):
        assert each.word in KNOWN, each
        if each.word == "FROM":
            image, *name = each.rest.split(" AS ")
            argument = re.fullmatch(r"\$\{(\w+)\}", image)
            assert argument is not None, "the base image is an argument"
            assert any(a.startswith(f"{argument[1]}=") for a in of(file, "ARG"))
            stages.update(name)
        if each.word == "COPY":
            *sources, _ = each.rest.split()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in stages
                continue
            for source in sources:
                path = Path(source.replace("${VARIANT}", variant))
                assert (ROOT / path).exists(), path
                assert not ignored(path), f".dockerignore leaves {path} out"
                num_copied += 1
    assert num_copied == 3  # the lock and the sources


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_commands_parse(file: Path) -> None:
    for command in commands(file):
        done = subprocess.run(
            ["bash", "-n", "-c", command], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_packages_are_installed_with_all_that_they_need_and_nothing_is_resolved(
    file: Path,
) -> None:
    installs = [words for c in commands(file) if "pip install" in c for words in c.split("&&")]
    installs = [words for words in installs if "pip install" in words]
    assert len(installs) == 2
    assert all("--no-deps" in words for words in installs)
    folders = [Path(word) for word in shlex.split(installs[1]) if word.startswith("./")]
    assert all((ROOT / folder / "pyproject.toml").is_file() for folder in folders)
    names = {folder.name for folder in folders}
    for name in names:
        assert SIBLINGS.get(name, set()) <= names, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_an_image_starts_a_program_of_its_packages_without_root(file: Path) -> None:
    scripts = set()
    for project in (ROOT / "packages").glob("*/pyproject.toml"):
        scripts |= set(tomllib.loads(project.read_text())["project"].get("scripts", {}))
    (entry,) = of(file, "ENTRYPOINT")
    assert yaml.safe_load(entry)[0] in scripts
    assert of(file, "USER") == ["1000"]
    # No secret becomes part of an image.
    assert not re.search(r"(ARG|ENV)[^\n]*(TOKEN|KEY|SECRET)", file.read_text())


def test_the_server_of_an_engine_is_where_the_pages_say() -> None:
    page = (ROOT / "docs" / "containers.md").read_text()
    for engine in ("vllm", "sglang"):
        assert (
            f"COPY --from=build /opt/{engine} /opt/{engine}"
            in (FOLDER / f"{engine}.Dockerfile").read_text()
        )
        assert f"rollout.server_command=[/opt/{engine}/bin/treadle-rollout-server]" in page


def test_the_compose_file_has_what_a_run_needs_of_its_container() -> None:
    train = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["train"]
    assert (FOLDER / train["build"]["context"] / train["build"]["dockerfile"]).is_file()
    assert train["ipc"] == "host"
    assert train["ulimits"] == {"memlock": -1, "nofile": 65535}
    # Names without values: what the calling shell has.
    assert {"HF_TOKEN", "WANDB_API_KEY"} <= train["environment"].keys()
    assert not any(train["environment"].values())
    assert "seccomp=unconfined" in train["security_opt"]
