from collections.abc import Iterator

import pytest
from seeds.hub import served_hub
from seeds.project import Project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project, with GSM8K where the seeds' first command puts it."""
    with served_hub() as address:
        made = Project(tmp_path_factory.mktemp("seeds"), address)
        data = made.bash("python examples/data_preprocess/gsm8k_multiturn_w_tool.py")
        assert data.status == 0, data.said
        yield made
