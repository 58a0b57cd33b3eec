"""Light packages import no heavy library.

The import runs in a clean interpreter that records every module looked for, so that an optional
import counts even if the library is missing.  benchmarks/import_time.py measures how long it takes.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import treadle.agent_loop
import treadle.tools
import treadle.tracing
from treadle.rollout.v1 import errors_pb2

HEAVY = {
    "PIL",
    "bm25s",
    "httpx",
    "httpx2",
    "jinja2",
    "langchain_core",
    "langgraph",
    "math_verify",
    "mcp",
    "megatron",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "pydantic_monty",
    "ray",
    "rich",
    "safetensors",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
}
JYTHON_PROBE = "org"  # the standard library's pickle looks for it
CHILD = """
import json, sys

looked_for = set()

class Watch:
    def find_spec(self, name, path=None, target=None):
        looked_for.add(name)

module, sys.path[:0] = sys.argv[1], json.loads(sys.argv[2])
sys.meta_path.insert(0, Watch())
__import__(module)
print(json.dumps([sys.modules[module].__file__, sorted(looked_for)]))
"""


def source_roots() -> list[str]:
    """Returns the folders of our packages, as absolute paths, because the child runs elsewhere."""
    files = [treadle.agent_loop.__file__, treadle.tools.__file__, treadle.tracing.__file__]
    roots = [Path(file).absolute().parents[2] for file in files]
    return [str(root) for root in [*roots, Path(errors_pb2.__file__).absolute().parents[3]]]


def imported(module: str, search_path: list[str], tmp_path: Path) -> tuple[str, set[str]]:
    """Returns the file of a module and the top-level names that importing it looked for."""
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    child = subprocess.run(
        [sys.executable, "-I", "-c", CHILD, module, json.dumps([*search_path, *libraries])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    file, names = json.loads(child.stdout)
    return file, {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", ["treadle.agent_loop", "treadle.tools", "treadle.tracing"])
def test_a_light_package_looks_for_no_heavy_library(module: str, tmp_path: Path) -> None:
    _, names = imported(module, source_roots(), tmp_path)
    assert names & HEAVY == set()


def test_agent_loop_without_its_client_needs_the_standard_library_only(tmp_path: Path) -> None:
    _, names = imported("treadle.agent_loop", source_roots(), tmp_path)
    assert names - sys.stdlib_module_names - {JYTHON_PROBE} == {"treadle"}


def test_its_client_adds_grpc_but_nothing_heavy(tmp_path: Path) -> None:
    _, names = imported("treadle.agent_loop.rpc", source_roots(), tmp_path)
    assert "grpc" in names
    assert names & HEAVY == set()


def test_the_wheels_alone_are_as_light(tmp_path: Path) -> None:
    wheels = list(Path().glob("treadle_*.whl"))
    if not wheels:
        pytest.skip("no wheels in the working directory; `./pants test` builds them")
    installed = tmp_path / "installed"
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(installed)
    file, names = imported("treadle.agent_loop.rpc", [str(installed)], tmp_path)
    assert Path(file).is_relative_to(installed)
    assert names & HEAVY == set()
