"""What of a task's image the sandbox can honour, and a sentence for what it cannot.

The sandbox has no images: its system is this machine's. An image that begins with a plain system
and then only sets, copies and runs is prepared when its room opens; everything else is refused
before a run starts, by the instruction. All functions are pure, except that those of system
packages are looked up on this machine.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from treadle.tools.sandbox.room import ROOM_ENVIRONMENT

_PLAIN: Final = re.compile(
    r"(docker\.io/)?(library/)?(buildpack-deps|debian|python|ubuntu)(:[\w.-]+)?"
    r"|ghcr\.io/(laude-institute|harbor-framework)/t-\w+/(python-3-\d+|ubuntu-24-04)(:[\w.-]+)?"
)
_NO_MATTER: Final = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
_NETWORK: Final = re.compile(
    r"\b(apt|apt-get|apk|conda|curl|dnf|npm|npx|pip3?|pnpm|uvx?|wget|yarn|yum)\s|\bgit clone\b"
)
_PART_OF_APT: Final = re.compile(
    r"apt(-get)?( -\S+)* (update|clean|autoremove)( -\S+)*|rm -rf /var/lib/apt/lists/?\*?"
)
_APT_INSTALL: Final = re.compile(r"(?:\w+=\w+ )?apt(?:-get)?(?: -\S+)* install (.+)")
_WORD: Final = re.compile(
    r"(?P<space>\s+)|'(?P<raw>[^']*)'|\\(?P<escaped>.)|(?P<quote>\")|\$(?P<name>\w+)"
    r"|\$\{(?P<long>\w+)(?:(?P<operator>:?[-+])(?P<other>[^{}$'\"\\]*))?\}|(?P<plain>.)",
    re.DOTALL,
)


class UnsupportedTaskError(ValueError):
    """The task needs something that the sandbox cannot give; the message is the whole sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """One instruction, to be done when the room opens.

    Attributes:
        copied: Files or folders of the task's environment folder and, last, where they go.
        command: Is run in the room.
    """

    text: str
    copied: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    workdir: str
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """What a room is prepared with, in order, and what its commands have.

    Attributes:
        workdir: An absolute path, which may not be there yet.
    """

    steps: tuple[BuildStep, ...] = ()
    workdir: str = "/"
    environment: Mapping[str, str]


def read_image(
    folder: Path, docker_image: str | None, *, images: Sequence[str], network: bool
) -> TaskImage:
    """Returns how to prepare a room for a task, from its Dockerfile or the image that it names.

    Args:
        folder: Folder with the Dockerfile and the files that it copies.
        docker_image: Image that the task names; used only without a Dockerfile.
        images: Other images that this machine's system stands for.
        network: Whether the room has a network.

    Raises:
        UnsupportedTaskError: The task needs something that the sandbox lacks.
    """
    if list(folder.glob("*compose*.y*ml")):
        raise UnsupportedTaskError("it has a compose file, and the sandbox runs one container")
    dockerfile = folder / "Dockerfile"
    if not dockerfile.exists():
        if docker_image is None:
            raise UnsupportedTaskError("its environment folder has no Dockerfile")
        _check_base(f"docker_image {docker_image}", docker_image, images)
        return TaskImage(environment={})
    steps: list[BuildStep] = []
    workdir, environment = "/", dict[str, str]()
    instructions = list(_instructions(dockerfile.read_text()))
    if [name for name, _ in instructions].count("FROM") != 1:
        raise UnsupportedTaskError("its Dockerfile has not one FROM, and stages are not built")
    ignore = [path.name for path in sorted(folder.glob("*.dockerignore"))]
    for name, value in instructions:
        text = f"{name} {value}"
        variables = {**ROOM_ENVIRONMENT, **environment}
        if name == "FROM":
            _check_base(text, " ".join(_words(text, value, variables)), images)
        elif name == "WORKDIR":
            workdir = str(
                PurePosixPath(workdir) / "".join(_words(text, value, variables, split=False))
            )
        elif name in ("ENV", "ARG"):
            environment |= _assigned(text, value, variables)
        elif name in ("COPY", "ADD"):
            if ignore:
                raise UnsupportedTaskError(
                    f"its environment folder has a {ignore[0]}, which is not supported with "
                    f"{text!r:.80}: remove the file, or copy by names"
                )
            listed = _json_words(value)
            given = [
                word
                for part in ([value] if listed is None else listed)
                for word in _words(text, part, variables, split=listed is None)
            ]
            copied = _copied(text, given, workdir)
            steps.append(
                BuildStep(text=text, copied=copied, workdir=workdir, environment=dict(environment))
            )
        elif name == "RUN":
            if command := _run(text, value, network=network):
                steps.append(
                    BuildStep(
                        text=text, command=command, workdir=workdir, environment=dict(environment)
                    )
                )
        elif name not in _NO_MATTER and (name, value) not in (("USER", "root"), ("USER", "0")):
            raise UnsupportedTaskError(f"its Dockerfile has {text!r:.80}, which is not supported")
    return TaskImage(steps=tuple(steps), workdir=workdir, environment=environment)


def check_script(name: str, script: str) -> None:
    """Checks that a script can run without a network.

    Raises:
        UnsupportedTaskError: A line of it seems to need one.
    """
    for number, line in enumerate(script.splitlines(), start=1):
        if not line.lstrip().startswith("#") and _NETWORK.search(line) and "localhost" not in line:
            raise UnsupportedTaskError(
                f"{name} needs the network in line {number}, {line.strip()!r:.80}: set `network: "
                "host`, or change it"
            )


def _check_base(text: str, image: str, images: Sequence[str]) -> None:
    name = image.split(" ")[0]
    if name not in images and not _PLAIN.fullmatch(name):
        raise UnsupportedTaskError(
            f"{text!r:.80} is not a plain system: if this machine has what it has, name it in "
            "`images`"
        )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yields name and value of each instruction, with continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, value = line.strip().partition(" ")
            if "<<" in value and name.upper() in ("RUN", "COPY", "ADD"):
                raise UnsupportedTaskError(f"its Dockerfile has a here-document: {line!r:.80}")
            yield name.upper(), value.strip()


def _words(text: str, value: str, variables: Mapping[str, str], *, split: bool = True) -> list[str]:
    """Returns the words of an instruction's value, with variables and quotes as Docker reads them.

    Args:
        split: Whether blanks outside quotes end a word.

    Raises:
        UnsupportedTaskError: A quote is open, or it has a `${` of another form.
    """
    words, word, quoted, at = list[str](), "", False, 0
    begun = False
    while match := _WORD.match(value, at):
        kind, part, at = match.lastgroup, match[0], match.end()
        if kind == "space" and split and not quoted:
            words += [word] if begun else []
            word, begun = "", False
            continue
        begun = True
        if kind == "quote":
            quoted = not quoted
        elif part.startswith("'") and quoted:
            word, at = word + "'", match.start() + 1
        elif kind == "raw":
            word += match["raw"]
        elif kind == "escaped":
            word += part if quoted and match["escaped"] not in '"$\\' else match["escaped"]
        elif part.startswith("${") or kind == "name":
            word += _value(match, variables)
        elif part == "'" or (part == "$" and value[at : at + 1] == "{"):
            problem = "a quote that does not end" if part == "'" else "a ${ of an unknown form"
            raise UnsupportedTaskError(f"its Dockerfile has {text!r:.80}: it has {problem}")
        else:
            word += part
    if quoted:
        raise UnsupportedTaskError(
            f"its Dockerfile has {text!r:.80}: it has a quote that does not end"
        )
    return [*words, word] if begun else words


def _value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Returns what `$NAME`, `${NAME}` or one of `${NAME:-other}`, `-`, `:+` and `+` stands for."""
    name, operator = match["name"] or match["long"], match["operator"] or ""
    there = variables.get(name, "") != "" if ":" in operator else name in variables
    if operator.endswith("+"):
        return match["other"] if there else ""
    return variables.get(name, "") if there or not operator else match["other"]


def _assigned(text: str, value: str, variables: Mapping[str, str]) -> dict[str, str]:
    name, *rest = value.split(maxsplit=1) or [""]
    if rest and "=" not in name:  # the old form, ENV NAME VALUE
        return {name: "".join(_words(text, rest[0], variables, split=False))}
    return dict(part.split("=", 1) for part in _words(text, value, variables) if "=" in part)


def _json_words(value: str) -> list[str] | None:
    """Returns the words of the JSON form; None: it is the shell form, which may begin with `[`."""
    try:
        words = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return words


def _copied(text: str, given: Sequence[str], workdir: str) -> tuple[str, ...]:
    names = [name for name in given if not name.startswith(("--chown=", "--chmod="))]
    sources, target = names[:-1], names[-1] if names else ""
    refused = [n for n in sources if "://" in n or n.startswith("--") or ".." in n.split("/")]
    archives = [n for n in sources if text.startswith("ADD") and ".tar" in n]
    if not sources or refused or archives:
        raise UnsupportedTaskError(
            f"its Dockerfile has {text!r:.80}: only files of the task's environment folder are "
            "copied"
        )
    end = "/" if target.endswith(("/", ".")) or len(sources) > 1 else ""
    return (*sources, str(PurePosixPath(workdir) / target) + end)


def _run(text: str, value: str, *, network: bool) -> tuple[str, ...]:
    """Returns what is run; nothing if this machine has what it installs."""
    if value.startswith("--"):
        raise UnsupportedTaskError(f"its Dockerfile has {text!r:.80}: flags are not supported")
    command = tuple(_json_words(value) or ("/bin/sh", "-c", value))
    parts = [" ".join(part.split()) for part in re.split(r"&&|;|\n", value) if part.strip()]
    wanted: list[str] = []
    for part in parts:
        if (install := _APT_INSTALL.fullmatch(part)) is not None:
            wanted += [name for name in install.group(1).split() if not name.startswith("-")]
        elif not _PART_OF_APT.fullmatch(part):
            break
    else:
        if missing := [name for name in wanted if not _has_package(name.partition("=")[0])]:
            raise UnsupportedTaskError(
                f"its Dockerfile has {text!r:.80}: this machine lacks {', '.join(missing)}, and "
                "the sandbox installs nothing"
            )
        return ()
    if _NETWORK.search(value) and not network:
        raise UnsupportedTaskError(
            f"its Dockerfile has {text!r:.80}, which needs the network: set `network: host`"
        )
    return command


def _has_package(name: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    command = ["dpkg-query", "-W", "-f", "${Status}", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "install ok installed" in done.stdout
