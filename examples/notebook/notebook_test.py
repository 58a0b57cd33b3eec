"""The notebook runs from its first cell to its last, as it stands."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent / "train_from_python.ipynb"

pytestmark = pytest.mark.timeout(600)


def _notebook() -> nbformat.NotebookNode:
    notebook: nbformat.NotebookNode = nbformat.read(  # type: ignore[no-untyped-call]
        NOTEBOOK, as_version=4
    )
    return notebook


@pytest.fixture
def sockets() -> Iterator[str]:
    """Yields the place where client and kernel meet: files with a short path.

    By default they meet at five ports, which Jupyter draws and lets go before the kernel listens:
    a process beside the test may get one of them.
    """
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield f"{directory}/kernel"


def test_the_notebook_trains(tmp_path: Path, sockets: str) -> None:
    notebook = _notebook()
    client = NotebookClient(
        notebook, timeout=540, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    manager: Any = client.create_kernel_manager()
    manager.transport, manager.ip = "ipc", sockets
    client.km = manager
    # The kernel finds what the test finds. An error in a cell is an error here, with the cell.
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})

    said = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream" and output.name == "stdout"
    )
    steps = [line.partition(":")[0] for line in said.splitlines() if "mean reward" in line]
    assert steps == [f"step {step}" for step in range(1, 7)]
    (run,) = (tmp_path / "runs").iterdir()
    assert f"{run.relative_to(tmp_path) / 'report.html'}\n" in said
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The tool, the reward and the loop that ran are those of the notebook.
    assert all(0 < line["reward/mean"] <= 1 for line in metrics if line["step"] > 0)
    trajectories = (run / "trajectories.jsonl").read_text()
    assert '"one_round"' in trajectories
    assert "<tool_call>" in trajectories


def test_the_notebook_is_kept_without_results() -> None:
    for cell in _notebook().cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
