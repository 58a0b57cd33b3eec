from pathlib import Path

import pytest

from installs.foreign import PROJECTS, ROOT, environment, make_programs, make_repository, run


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with uv and build's command."""
    return make_programs(tmp_path_factory.mktemp("programs") / "venv")


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a git repository with the sources."""
    return make_repository(tmp_path_factory.mktemp("treadle"))


@pytest.fixture(scope="session")
def wheels(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of wheels and source distributions, as `python -m build` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    for project in PROJECTS:
        run(
            [programs / "pyproject-build", "--installer", "uv", "-o", folder, ROOT / project],
            cwd=folder,
            env=environment(programs),
        )
    return folder
