"""The official client of Tinker's API, from the index, against `treadle serve`.

`tinker_program.py` makes the calls. A custom loss runs in the client and needs torch there, so this
is left out where the index has no CPU build of it.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.served import KEY, ServeProcess
from installs.foreign import environment, install_torch, make_venv, run
from treadle.serve.app import PATHS

PROGRAM = Path(__file__).with_name("tinker_program.py")

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    running = ServeProcess(tmp_path_factory.mktemp("serve") / "state", "policy.backend=fsdp")
    yield running
    running.process.terminate()
    assert running.process.wait() == 0


@pytest.mark.parametrize("version", ["0.36.0", "0.38.0"])
def test_every_call_of_the_official_client_is_answered_or_refused(
    service: ServeProcess, programs: Path, tmp_path: Path, version: str
) -> None:
    bin_folder = make_venv(tmp_path / "venv", programs)
    env = environment(bin_folder, programs) | {"VIRTUAL_ENV": str(bin_folder.parent)}
    with contextlib.suppress(pytest.skip.Exception):
        install_torch(bin_folder, programs)
    run([programs / "uv", "pip", "install", "-q", f"tinker=={version}"], cwd=tmp_path, env=env)
    settings = {"TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
    said = run([bin_folder / "python", PROGRAM], cwd=tmp_path, env=env | settings)
    *_, last = said.splitlines()
    found, paths = json.loads(last)
    assert found == version
    known = {_plain(path) for _, path in PATHS}
    # An address of the SDK's own tests.
    assert {_plain(path) for path in paths if path != "/sessions/test-session"} <= known


def _plain(path: str) -> str:
    """Returns a path without the names of what varies."""
    return re.sub(r"{[^}]*}", "{}", path)
