"""The files of the host that a sandboxed program sees: only what an interpreter needs.

Invariant: everything is read-only, and no directory is shown in which the host's own packages or
programs' data live: `site-packages` and `dist-packages` are covered with empty ones, and of the
host's libraries exactly the distributions named (with what they require) appear below
`PACKAGES`. Read once, at start.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from treadle.agent_loop import SetupError

PACKAGES = "/packages"
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/bin")
_MERGED = ("/lib", "/lib32", "/lib64", "/bin")
_BASH = "/bin/bash"
_OF_ETC = (
    *("alternatives", "ca-certificates", "ca-certificates.conf", "debian_version", "hosts"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "nsswitch.conf"),
    *("os-release", "pki", "protocols", "resolv.conf", "services", "ssl", "terminfo"),
)
"""What programs read of `/etc`, and what says nothing of the host's users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFiles:
    """The files that are shown, as absolute paths.

    Attributes:
        python: The interpreter, the same inside and outside.
        links: (target, inside): the symbolic links of the root directory.
        covers: Directories below `binds` that are covered with empty ones.
        library_path: For the dynamic loader, where the interpreter is not the system's.
        languages: Languages that can be run with them.
    """

    python: str
    binds: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    covers: tuple[str, ...]
    library_path: str
    languages: tuple[str, ...]


def find_host_files(packages: Iterable[str]) -> HostFiles:
    """Looks up this interpreter and the given distributions.

    Raises:
        SetupError: A distribution is not installed.
    """
    shown, links, library = _shown(_SYSTEM, _MERGED)
    standard_library = os.path.realpath(sysconfig.get_path("stdlib"))
    roots = {Path(path) for path in (*shown, library)}
    covers = {
        str(found)
        for root in roots
        for kind in ("site-packages", "dist-packages")
        for found in root.glob(f"python*/{kind}")
    }
    covers |= {str(found) for found in Path(standard_library).glob("*-packages")}
    return HostFiles(
        python=_python(),
        binds=tuple((path, path) for path in shown) + _packages(packages),
        links=links,
        covers=tuple(sorted(covers)),
        library_path="" if library.startswith("/usr/lib") else library,
        languages=("python", "bash") if os.path.exists(_BASH) else ("python",),
    )


def find_root_files() -> HostFiles:
    """Returns the whole system of this machine: `/usr`, and what programs read of `/etc`.

    Raises:
        SetupError: It has no bash.
    """
    if not os.path.exists(_BASH):
        raise SetupError(f"the sandbox needs {_BASH}, which this machine lacks: install bash")
    shown, links, library = _shown(("/usr",), (*_MERGED, "/sbin"))
    shown += [path for name in _OF_ETC if os.path.exists(path := f"/etc/{name}")]
    return HostFiles(
        python=_python(),
        # A link of `/etc` may lead to where nothing is shown: `/run`, for example.
        binds=tuple((os.path.realpath(path), path) for path in shown),
        links=links,
        covers=(),
        library_path="" if library.startswith("/usr/lib") else library,
        languages=("python", "bash"),
    )


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def _shown(
    system: Iterable[str], merged: Iterable[str]
) -> tuple[list[str], tuple[tuple[str, str], ...], str]:
    """Returns the paths of system and interpreter, links of `/`, and the interpreter's library."""
    library = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    shown = [path for path in system if os.path.isdir(path)]
    shown += [path for path in merged if os.path.isdir(path) and not os.path.islink(path)]
    for path in (library, os.path.realpath(sysconfig.get_path("stdlib")), _python()):
        if not any(Path(path).is_relative_to(parent) for parent in shown):
            shown.append(path)
    links = tuple((os.readlink(path), path) for path in merged if os.path.islink(path))
    return shown, links, library


def _packages(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Returns the files of distributions and of what they require, each below `PACKAGES`."""
    wanted = list(names)
    named = set(wanted)
    seen: set[str] = set()
    places: dict[str, str] = {}
    while wanted:
        name = wanted.pop()
        if _normal(name) in seen:
            continue
        seen.add(_normal(name))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in named:
                raise SetupError(
                    f"the sandbox is to have {name!r}, which is not installed beside "
                    f"{sys.executable}: pip install {name}, or leave it out of the packages"
                ) from None
            continue  # required under a condition that does not hold here
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not top.startswith("/"):
                places[top] = os.path.realpath(str(distribution.locate_file(top)))
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement and (match := re.match(r"[\w.-]+", requirement)):
                wanted.append(match.group())
    return tuple((outside, f"{PACKAGES}/{top}") for top, outside in sorted(places.items()))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
