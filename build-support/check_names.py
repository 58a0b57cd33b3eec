"""Finds public classes of one name in several modules: `check_names.py FILE...`.

One name has one meaning in the whole house, so that a reader who sees it needs no import to know
which one it is. `SHARED` has the names with a reason to be an exception. Standard library only, any
Python from 3.8: pants-plugins/prose imports this module.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_SIDES = "the same thing of the contract on its two sides, which share no module"
_ENGINES = "the same role in each engine, which share no process"

SHARED = {
    "Clock": "one protocol, in packages that share no module",
    "CollectiveGroup": _SIDES,
    "FinishReason": _SIDES,
    "NamedTensor": _SIDES,
    "PlacedImage": _SIDES,
    "Tag": _SIDES,
    "TensorSpec": _SIDES,
    "Logger": "found by this name in the module of each logger",
    "SeededSampler": _ENGINES,
    "Sequence": _ENGINES,
    "MicroBatch": "the same role in each backend of the policy",
    "Tokens": "public in both packages: a transcript, and the tokens of one event of an engine",
    "ServerConfig": "public in both packages: of a rollout server, and of an MCP server",
}
"""Names that several classes have, and why."""
_CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)


def is_checked(path: str) -> bool:
    """Returns whether a file is a production module."""
    name = path.rpartition("/")[2]
    return (
        path.startswith("packages/")
        and name.endswith(".py")
        and not name.endswith(("_test.py", "_pb2.py"))
        and name not in ("conftest.py", "testing.py")
        and "/testing/" not in path
    )


def findings(modules: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields `path:line: what is wrong` for each class of a name that another one has.

    Args:
        modules: Path and text of all production modules.
    """
    found: dict[str, list[str]] = {}
    for path, text in sorted(modules):
        for match in _CLASS.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.setdefault(match[1], []).append(f"{path}:{line}")
    for name, places in sorted(found.items()):
        if name in SHARED and len(places) == 1:
            yield f"{places[0]}: {name} is the only one now: take it out of SHARED in {__file__}"
        elif len(places) > 1 and name not in SHARED:
            for place in places:
                others = ", ".join(other for other in places if other != place)
                yield f"{place}: {name} is also a class of {others}: give one of them another name"


def main(argv: list[str]) -> int:
    """Prints what was found in the files; returns the exit status."""
    paths = [path for path in argv if is_checked(path)]
    found = list(findings((path, Path(path).read_text("utf-8")) for path in paths))
    print("\n".join(found) if found else f"the classes of {len(paths)} modules have own names")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
