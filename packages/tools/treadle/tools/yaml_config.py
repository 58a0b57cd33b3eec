"""Reads YAML files of settings, in which every key is either used or an error.

Invariant: an invalid file raises a `SetupError` that names the file, the place in it, the value and
the known values. Read once, at start.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import yaml

from treadle.agent_loop import SetupError, load_import_path
from treadle.agent_loop.errors import did_you_mean
from treadle.tools.interpolation import InterpolationError, resolve


def read_yaml(path: Path, what: str, *, literal: bool = False) -> object:
    """Reads a YAML file.

    Args:
        what: Names it in errors, as "tool catalogue".
        literal: Whether `${...}` is text; otherwise it is a reference, as in a configuration.

    Raises:
        SetupError: It cannot be read, is not YAML, or has a reference that leads nowhere.
    """
    try:
        document: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read the {what} {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SetupError(f"the {what} {path} is not YAML: {error}") from error
    return document if literal else _resolved(document, "", document, f"the {what} {path}")


def _resolved(value: object, key: str, document: object, where: str) -> object:
    """Returns a value with its references resolved; an item of a list has its number as a key."""
    if isinstance(value, dict):
        return {k: _resolved(v, f"{key}.{k}", document, where) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolved(v, f"{key}.{n}", document, where) for n, v in enumerate(value)]
    try:
        found = resolve(value, key[1:], partial(_value_at, document))
    except InterpolationError as error:
        raise SetupError(f"{where}: {key[1:]}: {value!r}: {error}") from None
    return found


def _value_at(document: object, place: str) -> object:
    """Returns the value at `a.b`, `a[0].b` or `a.0.b`; raises KeyError if there is none."""
    for name in place.replace("[", ".").replace("]", "").split("."):
        if isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        elif isinstance(document, dict):
            document = document[name]
        else:
            raise KeyError(place)
    return document


def load_class(
    name: str, where: str, *, verl: Mapping[str, str], kind: str, base: Path | None = None
) -> type:
    """Returns the class that a path names.

    Args:
        name: `package.module.Class`, `file.py:Class`, or verl's name of a class that exists here.
        base: The folder that the path of a file starts from.
        kind: The kind of object that the class makes, as "tool".

    Raises:
        SetupError: There is no such class.
    """
    target = verl.get(name, name)
    if target.startswith("verl."):
        raise SetupError(
            f"{where}: {name} is {_article(kind)} {kind} of verl that does not exist here; of "
            f"verl's {kind}s there are: {', '.join(sorted(verl))}"
        )
    if ":" in target:
        own = load_import_path(target, kind, base=base)
        if not isinstance(own, type):
            raise SetupError(f"{where}: {name} is not a class")
        return own
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise SetupError(
            f"{where}: class_name {name!r} is neither package.module.Class nor file.py:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a border: a module of the user's may raise anything
        reason = f"{type(error).__name__}: {error}"
        raise SetupError(
            f"{where}: cannot import {module_name}: {reason}; code of your own is named by its "
            f"file, as path/to/file.py:{class_name}"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        near = did_you_mean(class_name, [k for k, v in vars(module).items() if isinstance(v, type)])
        raise SetupError(f"{where}: {module_name} has no class {class_name!r}{near}")
    return found


def section(
    value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, object]:
    """Returns the mapping `value`, checked for all `required` keys and for no unlisted ones.

    Raises:
        SetupError: It is not a mapping, or has other keys.
    """
    fields = mapping(value, where)
    for key in fields:
        if key not in required + optional:
            raise SetupError(
                f"{where}: unknown key {key!r}{did_you_mean(key, required + optional)}; "
                f"known are: {', '.join(required + optional)}"
            )
    missing = [key for key in required if key not in fields]
    if missing:
        raise SetupError(f"{where}: {', '.join(missing)} missing")
    return fields


def mapping(value: object, where: str) -> Mapping[str, object]:
    """Returns the mapping `value`.

    Raises:
        SetupError: It is not a mapping with string keys.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise SetupError(f"{where} must be a mapping with string keys, got {value!r}")
    return value


def string(value: object, where: str) -> str:
    """Returns the string `value`.

    Raises:
        SetupError: It is not a string, or is empty.
    """
    if not isinstance(value, str) or not value:
        raise SetupError(f"{where} must be a non-empty string, got {value!r}")
    return value


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"
