"""Loads a user's own code by its import path: "path/to/file.py:name" or "package.module:name".

The name may be dotted, such as "Outer.Inner".

Invariant: the code is loaded at start; an import path that cannot be resolved raises a `SetupError`
that lists what exists instead. A file is executed once per process, like a module, however many
import paths name it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from treadle.agent_loop.errors import SetupError
from treadle.agent_loop.user_code import user_place


def load_import_path(reference: str, what: str, *, base: Path | None = None) -> object:
    """Returns what `reference` names.

    Args:
        what: Names it in errors, as "reward".
        base: The folder that a relative path starts from. None: the working directory.

    Raises:
        SetupError: The import path is malformed, the file or module cannot be loaded, or it has no
            such name.
    """
    where, _, name = reference.rpartition(":")
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise SetupError(f"the {what} {reference!r} is neither path.py:name nor module:name")
    if where.endswith(".py"):
        module = _load_file((base or Path.cwd()) / where, what)
    else:
        module = _load_module(where, what)
    try:
        found: object = attrgetter(name)(module)
    except AttributeError:
        own = sorted(
            key
            for key, value in vars(module).items()
            if not key.startswith("_") and not isinstance(value, ModuleType)
        )
        raise SetupError(
            f"the {what} {reference!r}: {where} has no {name!r}; it has: {', '.join(own) or 'none'}"
        ) from None
    return found


def cannot_load(where: str, what: str, error: Exception | SystemExit) -> SetupError:
    """Returns the error of code that raised while it was loaded."""
    text = f"cannot load the {what} from {where}: {type(error).__name__}: {error}"
    if (place := user_place(error)) is not None:
        text += f" ({place})"
    if isinstance(error, SystemExit):
        text += (
            "; it ends the program when it is imported: begin its command line below "
            '`if __name__ == "__main__":`'
        )
    return SetupError(text)


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise SetupError(f"the {what} file {path} does not exist")
    # Two files of one name are two modules.
    place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:8]
    name = f"treadle_user_{path.stem}_{place}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look their module up by its name.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise cannot_load(str(path), what, error) from error
    return module


def _load_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise cannot_load(name, what, error) from error
        raise SetupError(
            f"cannot load the {what} from {name}: no such module is installed; code of your own "
            "is named by its file, as path/to/file.py:name"
        ) from error
    except (Exception, SystemExit) as error:
        raise cannot_load(name, what, error) from error
