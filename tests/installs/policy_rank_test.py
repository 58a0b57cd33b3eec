"""A policy rank in an environment of its own: another Python, another torch, another Megatron-core.

`TREADLE_POLICY_RANK` is the command that starts a rank there. Without it the environment is made,
where the package index has a CPU build of torch for that Python.
"""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from compare_runs import is_compared

from e2e.testing import SMALL, Trainer
from installs.foreign import environment, install_torch, make_venv, run

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def command(
    wheels: Path, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """What starts a rank on Python 3.12."""
    if (given := os.environ.get("TREADLE_POLICY_RANK")) is not None:
        return tuple(shlex.split(given))
    folder = tmp_path_factory.mktemp("rank")
    bin_folder = make_venv(folder / "venv", programs, "3.12")
    env = install_torch(bin_folder, programs)
    package = "treadle-policy[megatron]"
    run(
        [programs / "uv", "pip", "install", "-q", "--find-links", wheels, package],
        cwd=folder,
        env=env,
    )
    return (str(bin_folder / "treadle-policy-rank"),)


def test_a_run_whose_ranks_change_their_environment_is_that_of_one_environment(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    versions = run([*command, "--version"], cwd=tmp_path, env=environment())
    assert "megatron 0.19.2, " in versions
    assert f"Python {sys.version_info.major}.{sys.version_info.minor}." not in versions

    def train(folder: str, steps: int, *settings: str) -> Trainer:
        unvalidated = ("schedule.val_every=null", "data.val_files=[]")
        more = (f"schedule.total_steps={steps}", *unvalidated, *settings)
        trainer = Trainer(tmp_path / folder, [*SMALL, *more])
        assert trainer.wait() == 0, trainer.output
        return trainer

    there = f"policy.command={json.dumps(command)}"
    train("changing", 2, there)
    train("changing", 3)  # from a checkpoint of the other Megatron-core
    changing, one = train("changing", 4, there).metrics(), train("one", 4).metrics()
    assert [line["step"] for line in changing] == [line["step"] for line in one]
    for line, wanted in zip(changing, one, strict=True):
        for metric in filter(is_compared, line.keys() | wanted.keys()):
            assert line[metric] == pytest.approx(wanted[metric], rel=1e-6, abs=1e-6), metric
