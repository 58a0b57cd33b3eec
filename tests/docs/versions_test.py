"""The table of docs/versions.md has every version, and what this one requires."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def table() -> dict[str, list[str]]:
    """Returns the table's rows by version, newest first."""
    text = (ROOT / "docs/versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+\.\d\S*) \| (.*) \|$", text, re.MULTILINE)
    return {version: rest.split(" | ") for version, rest in rows}


def project(package: str) -> dict[str, Any]:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def test_the_table_has_this_version_and_every_release() -> None:
    releases = {path.parent.name for path in ROOT.glob("tests/contract/released/*/contract.binpb")}
    assert set(table()) == releases | {project("trainer")["version"]}


def test_the_row_of_this_version_is_what_the_packages_require() -> None:
    server = project("rollout_server")
    lines = " ".join(line for extra in server["optional-dependencies"].values() for line in extra)
    found = dict(re.findall(r"\b(torch|transformers|vllm|sglang)[>=]=(\S+)", lines))
    megatron = " ".join(project("policy")["optional-dependencies"]["megatron"])
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(server["classifiers"]))
    assert next(iter(table().values()))[1:] == [
        "`v1`",
        f"{pythons[0]} to {pythons[-1]}",
        f"{found['torch']} or later",
        f"{found['transformers']} or later",
        " or ".join(re.findall(r"megatron-core==([\d.]+)", megatron)),
        found["vllm"],
        found["sglang"],
    ]
