"""`treadle new NAME`: the files of a task that trains as it stands, to be changed step by step.

The files are those of `trainer/template`, where the task is called `my_task`.
docs/your_own_task.md explains them one by one.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from treadle.trainer.cli.console import fail, say

__all__ = ["TEMPLATE", "main"]

TEMPLATE = Path(__file__).parent.parent / "template"
_NAME_IN_TEMPLATE = "my_task"
# It becomes a folder, a data source and the name of runs.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")


class NewTaskError(RuntimeError):
    """The task cannot be written; the message names the cause, the value and the fix."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treadle new",
        description="Writes a folder with rows, a reward, a tool and a configuration, which train "
        "a small model that ships with Treadle, in about a minute on two CPU cores.",
    )
    parser.add_argument(
        "folder", type=Path, metavar="NAME", help="name of the task; with a path, where to write it"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    folder = _parser().parse_args(argv).folder
    try:
        _check(folder)
        written = _write(folder)
    except NewTaskError as error:
        return fail(error)
    except OSError as error:
        return fail(NewTaskError(f"cannot write {folder}: {error.strerror or error}"), status=1)
    say(f"wrote {folder}: {', '.join(written)}")
    say(f"train:  cd {folder} && treadle --config config.yaml")
    return 0


def _check(folder: Path) -> None:
    name = folder.absolute().name
    if _NAME.fullmatch(name) is None:
        raise NewTaskError(
            f"{name!r} cannot be the name of a task: begin with a letter, and use at most 64 "
            "letters, digits, - and _"
        )
    if folder.is_dir():
        if any(folder.iterdir()):
            raise NewTaskError(f"{folder} is not empty: choose another name, or empty it")
    elif folder.exists():
        raise NewTaskError(f"{folder} is a file: choose another name")


def _write(folder: Path) -> list[str]:
    """Writes the files of the template; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder.absolute().name
    files = sorted(file for file in TEMPLATE.iterdir() if file.is_file())
    for file in files:
        text = file.read_text(encoding="utf-8").replace(_NAME_IN_TEMPLATE, name)
        (folder / file.name).write_text(text, encoding="utf-8")
    return [file.name for file in files]
