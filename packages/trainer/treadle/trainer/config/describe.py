"""Writes the configuration for people: `--help`, `--print-config` and docs/config.md.

`python -m treadle.trainer.config.describe PATH` writes the document; a test checks that it is
current.
"""

import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, JsonValue

from treadle.trainer.config.keys import Leaf, all_leaves, all_sections, flatten
from treadle.trainer.config.load import LoadedConfig, LoadedSftConfig
from treadle.trainer.config.schema import Config
from treadle.trainer.config.sft import SftConfig
from treadle.trainer.config.verl.defaults import verl_keys
from treadle.trainer.config.verl_keys import known_keys
from treadle.trainer.config.verl_table import IMPLIED, NOTED

__all__ = ["document", "key_listing", "section_listing", "value_listing"]

_VERL = "verl's keys are accepted where Treadle has an equivalent."


def key_listing(root: type[BaseModel] = Config) -> str:
    """Returns every key with type, default, bounds and doc, section by section, for a terminal."""
    lines: list[str] = []
    section = None
    for leaf in all_leaves(root).values():
        name = leaf.key.rpartition(".")[0]
        if name != section:
            section = name
            lines += ["", *_section_head(name, root)]
        lines += _key_lines(leaf)
    return "\n".join([*lines[1:], "", _VERL])


def section_listing(name: str, root: type[BaseModel] = Config) -> str:
    """Returns the keys of a section and of those below it, as `key_listing` does."""
    lines: list[str] = _section_head(name, root)
    section = name
    for leaf in all_leaves(root).values():
        if not leaf.key.startswith(f"{name}."):
            continue
        own = leaf.key.rpartition(".")[0]
        if own != section:
            section = own
            lines += ["", *_section_head(own, root)]
        lines += _key_lines(leaf)
    return "\n".join([*lines, "", _VERL])


def _section_head(name: str, root: type[BaseModel]) -> list[str]:
    return textwrap.wrap(f"{name}: {' '.join(all_sections(root)[name].doc.split())}", 92)


def _key_lines(leaf: Leaf) -> list[str]:
    only = f" Only with kind {' or '.join(leaf.variants)}." if leaf.variants else ""
    return [
        f"  {leaf.key}  ({_type(leaf)}; {_default(leaf)})",
        *textwrap.wrap(leaf.doc + only, 92, initial_indent="      ", subsequent_indent="      "),
    ]


def value_listing(loaded: LoadedConfig | LoadedSftConfig) -> str:
    """Returns every leaf of the resolved tree as `key = value  # source`."""
    values = flatten(loaded.config.model_dump(mode="json"), root=type(loaded.config))
    entries = [(f"{key} = {_written(value)}", loaded.sources[key]) for key, value in values.items()]
    width = min(72, max(len(left) for left, _ in entries))
    return "\n".join(f"{left:<{width}}  # {source}" for left, source in entries)


def document() -> str:
    """Returns the reference of all keys, in Markdown."""
    return "\n".join(_document_lines())


def _document_lines() -> Iterator[str]:
    yield "# Configuration"
    yield ""
    yield "Generated from the models by `python -m treadle.trainer.config.describe docs/config.md`."
    yield "Later layers override earlier ones: defaults, `--config file.yaml` (repeatable),"
    yield "`key=value`. Lists are replaced. Setting the `kind` of a section drops what earlier"
    yield "layers set of keys that not every kind has; the kind's name alone is short for it"
    yield "(`sync.transport=file`). You add entries to a"
    yield "table under names of your choice (`agent.loops.mine=package.module:Class`). Paths in a"
    yield "file are relative to that file."
    yield from _tables(all_leaves().values(), "{}", Config)
    yield ""
    yield "## treadle sft"
    yield ""
    yield "[Supervised fine-tuning](sft.md) has the keys above that `treadle sft --help all` lists,"
    yield "with the same meaning, and these:"
    shared = all_leaves()
    own = [
        leaf
        for key, leaf in all_leaves(SftConfig).items()
        if key not in shared or _row(leaf) != _row(shared[key])
    ]
    yield from _tables(own, "{} (treadle sft)", SftConfig)
    yield from _counts_of_verl()
    yield ""


def _counts_of_verl() -> Iterator[str]:
    """Yields how many of verl's keys are read in which way."""
    keys = verl_keys()
    implied, noted = (sum(key in part for key in keys) for part in (IMPLIED, NOTED))
    known = {*known_keys(), *all_leaves()}
    read = sum(key in known for key in keys)
    yield ""
    yield "## verl's keys"
    yield ""
    page = "[Coming from verl](coming_from_verl.md)"
    yield f"Of {len(keys):,} settings of verl's training engines ({page}):"
    yield ""
    yield "| Settings | How they are read |"
    yield "|---|---|"
    yield f"| {read - implied - noted} | mean the same here |"
    yield f"| {implied} | accept the values that Treadle always has |"
    yield f"| {noted} | accepted with any value and without effect, which a note says |"
    yield f"| {len(keys) - read:,} | accepted at verl's default, refused at other values |"


def _tables(leaves: Iterable[Leaf], heading: str, root: type[BaseModel]) -> Iterator[str]:
    section = None
    for leaf in leaves:
        name = leaf.key.rpartition(".")[0]
        if name != section:
            section = name
            yield ""
            yield f"## {heading.format(name)}"
            yield ""
            yield f"{' '.join(all_sections(root)[name].doc.split())}"
            yield ""
            yield "| Key | Type | Default | Meaning |"
            yield "|---|---|---|---|"
        yield _row(leaf)


def _row(leaf: Leaf) -> str:
    only = f" Only with kind {' or '.join(leaf.variants)}." if leaf.variants else ""
    cells = (f"`{leaf.key}`", _type(leaf), _default(leaf), leaf.doc + only)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(leaf: Leaf) -> str:
    names = [_type_name(member) for member in leaf.alternatives]
    bounds = [
        f"{symbol} {getattr(constraint, name):g}"
        for constraint in _constraints(leaf)
        for name, symbol in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
        if getattr(constraint, name, None) is not None
    ]
    return ", ".join([" or ".join(names), *bounds])


def _constraints(leaf: Leaf) -> list[Any]:
    found = list(leaf.field.metadata)
    pending = [leaf.field.annotation]
    while pending:
        annotation = pending.pop()
        found += getattr(annotation, "__metadata__", ())
        pending += get_args(annotation)
    flat = [inner for item in found for inner in (item, *getattr(item, "metadata", ()))]
    return flat


def _type_name(member: Any) -> str:
    if member is NoneType:
        return "null"
    if get_origin(member) is Literal:
        return " or ".join(str(value) for value in get_args(member))
    if get_origin(member) is Mapping:
        return f"table of {_type_name(get_args(member)[1])}"
    if get_origin(member) is tuple:
        return f"list of {_type_name(get_args(member)[0])}"
    names = {
        Any: "values",
        JsonValue: "values",
        bool: "true or false",
        int: "integer",
        float: "number",
        str: "string",
        Path: "path",
    }
    return names.get(member, str(member))


def _default(leaf: Leaf) -> str:
    return "required" if leaf.required else f"default {_written(leaf.default)}"


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("...\n").strip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
