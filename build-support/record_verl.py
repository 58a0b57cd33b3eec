"""Records verl's keys with their defaults: `record_verl.py WHEEL`, a wheel of verl.

verl ships the whole configuration of each of its training engines as one YAML file, made from the
files that its trainer composes. The keys of these files and their defaults are the record; nothing
else of verl is read, and verl is not installed:

    pip download --no-deps verl==0.9.1
    python build-support/record_verl.py verl-0.9.1-py3-none-any.whl
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

RECORD = Path("packages/trainer/treadle/trainer/config/verl/defaults.json")
ENGINES = (
    "_generated_ppo_megatron_trainer.yaml",
    "_generated_ppo_trainer.yaml",
    "_generated_ppo_veomni_trainer.yaml",
    "_generated_ppo_torchtitan_trainer.yaml",
)
ABOUT = (
    "The keys of verl's trainer and their defaults; engines may differ. Recorded from verl's "
    "package by build-support/record_verl.py. verl is under the Apache License 2.0, Copyright "
    "Bytedance Ltd. and/or its affiliates."
)


def leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (key, default) of a configuration; an empty table is a leaf."""
    for name, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def record(wheel: Path) -> dict[str, list[Any]]:
    """Returns the defaults of each key of a wheel: one, or several where engines differ.

    Raises:
        KeyError: The wheel lacks the configuration of an engine.
    """
    defaults: dict[str, dict[str, Any]] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in ENGINES:
            content = yaml.safe_load(archive.read(f"verl/trainer/config/{name}"))
            for key, default in leaves(content):
                defaults.setdefault(key, {})[json.dumps(default)] = default
    return {key: list(values.values()) for key, values in defaults.items()}


def written(version: str, defaults: dict[str, list[Any]]) -> str:
    """Returns the record as JSON with a line per key."""
    lines = (f"    {json.dumps(key)}: {json.dumps(values)}" for key, values in defaults.items())
    return (
        f'{{\n  "about": {json.dumps(ABOUT)},\n  "version": {json.dumps(version)},\n'
        '  "defaults": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    )


if __name__ == "__main__":
    source = Path(sys.argv[1])
    RECORD.write_text(written(source.name.split("-")[1], record(source)), encoding="utf-8")
