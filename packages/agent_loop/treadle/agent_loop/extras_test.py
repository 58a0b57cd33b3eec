import importlib
import subprocess
import sys

import pytest

from treadle.agent_loop.extras import needs_extra


def test_a_missing_library_is_reported_with_the_extra_that_has_it() -> None:
    with (
        pytest.raises(ModuleNotFoundError) as raised,
        needs_extra("proxy", "treadle.agent_loop.proxy"),
    ):
        importlib.import_module("no_such_library")
    assert str(raised.value) == (
        "treadle.agent_loop.proxy needs no_such_library, which is not installed: "
        'pip install "treadle-agent-loop[proxy]"'
    )
    assert raised.value.name == "treadle.agent_loop.proxy"


def test_a_missing_module_of_ours_is_not_blamed_on_an_extra() -> None:
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'treadle\.nothing'"),
        needs_extra("proxy", "treadle.agent_loop.proxy"),
    ):
        importlib.import_module("treadle.nothing")


@pytest.mark.parametrize(
    ("program", "library", "extra", "arguments"),
    [
        ("proxy", "starlette", "proxy", []),
        ("proxy", "transformers", "hf", ["--replicas", "127.0.0.1:1", "--tokenizer", "."]),
        ("rpc.router", "grpc_health", "router", []),
    ],
)
def test_a_program_without_its_extra_names_it_in_one_line(
    program: str, library: str, extra: str, arguments: list[str]
) -> None:
    # An entry of None makes the import fail as it does where the library is not installed.
    child = (
        f"import runpy, sys; sys.modules[{library!r}] = None; sys.argv[1:] = {arguments!r}\n"
        f"runpy._run_module_as_main('treadle.agent_loop.{program}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f'pip install "treadle-agent-loop[{extra}]"' in done.stderr
