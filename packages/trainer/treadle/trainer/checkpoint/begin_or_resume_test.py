"""`run.resume=PATH`: a run begins at a checkpoint of another one, or is set back to one of its own.

What damage does to a resumed run is in training_loop/damaged_run_test.py.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.trainer.checkpoint.begin_or_resume import (
    ResumePoint,
    check_steps_left,
    find_resume_point,
)
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    POLICY,
    Best,
    Checkpoints,
    RunDirectory,
    RunDirectoryError,
)
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.training_loop.run_record import _begin


async def _write(directory: Path) -> None:
    (directory / POLICY).mkdir()
    (directory / POLICY / "common.pt").write_text(f"{directory.name} tensors")


def _make_run(
    path: Path,
    *arguments: str,
    saved: tuple[int, ...] = (1, 2),
    edit: Callable[[dict[str, Any]], object] = lambda config: None,
) -> Path:
    """Writes the directory of a run of two steps, of which `saved` have a checkpoint."""
    path.mkdir()
    config = load_config([DEMO], ["schedule.save_every=1", *arguments]).config
    values = config.model_dump(mode="json")
    edit(values)
    if values:
        (path / "config.json").write_text(json.dumps(values))
    for step in saved:
        asyncio.run(
            Checkpoints(path / CHECKPOINTS, keep=2).save(step, {"reward/mean": 0.5}, _write)
        )
    lines = "".join(json.dumps({"step": step, "reward/mean": step / 10}) + "\n" for step in (1, 2))
    (path / "metrics.jsonl").write_text(lines)
    return path


def _find(run: Path, *arguments: str) -> ResumePoint:
    config = load_config([DEMO], ["schedule.save_every=1", *arguments]).config
    return find_resume_point(RunDirectory(run), Checkpoints(run / CHECKPOINTS, keep=2), config)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return _make_run(tmp_path / "other")


@pytest.mark.parametrize(("which", "step"), [("", 2), ("checkpoints/step-00000001", 1)])
def test_a_new_run_begins_at_a_checkpoint_of_another(
    other: Path, tmp_path: Path, which: str, step: int
) -> None:
    found = _find(tmp_path / "new", f"run.resume={other / which}", "policy.optimizer.lr=0.5")
    assert (found.begun, found.first_step, found.after) == (False, step + 1, None)
    assert found.checkpoint is not None
    assert found.checkpoint.policy_directory == other / f"checkpoints/step-{step:08d}/policy"
    beginning, lr = found.notes
    assert beginning == f"beginning after step {step} of {other}, with its weights and optimizer"
    assert lr.startswith(f"not as in {other}: policy.optimizer.lr was ")
    with pytest.raises(
        RunDirectoryError, match=f"is of step {step}, and the run has {step}: raise"
    ):
        check_steps_left(found, step)
    check_steps_left(found, step + 1)


def test_the_same_command_goes_on_and_another_one_does_not(other: Path, tmp_path: Path) -> None:
    resume = f"run.resume={other}"
    saved = _make_run(tmp_path / "saved", resume, saved=(2,))
    for again in (resume, "run.resume=auto"):
        found = _find(saved, again)
        assert found.checkpoint is not None
        assert found.checkpoint.policy_directory.is_relative_to(saved)
        assert (found.begun, found.origin, found.after) == (True, None, 2)
    with pytest.raises(RunDirectoryError, match=r"run that did not begin from run\.resume="):
        _find(saved, f"run.resume={other / 'checkpoints' / 'step-00000001'}")

    unsaved = _make_run(tmp_path / "unsaved", resume, saved=())
    found = _find(unsaved, resume)
    assert (found.begun, found.origin, found.first_step, found.after) == (True, other, 3, 2)
    with pytest.raises(
        RunDirectoryError, match=f"began from {other} and saved no checkpoint: give"
    ):
        _find(unsaved)
    with pytest.raises(RunDirectoryError, match=r"already holds a run and run\.resume=never"):
        _find(unsaved, "run.resume=never")


def test_a_run_that_saves_nothing_cannot_go_on(tmp_path: Path) -> None:
    run = _make_run(tmp_path / "run", saved=())
    with pytest.raises(RunDirectoryError, match="kept no checkpoint to resume from"):
        _find(run, "schedule.save_every=null", "schedule.save_minutes=null")


def test_a_run_is_set_back_once_and_then_goes_on(tmp_path: Path) -> None:
    run = _make_run(tmp_path / "run")
    back = f"run.resume={run}/checkpoints/step-00000001"
    found = _find(run, back)
    assert (found.set_back, found.first_step, found.after) == (True, 2, 1)
    assert found.notes == ("set back to step 1: later steps are trained again",)
    assert not _find(run, f"run.resume={run}").set_back

    Checkpoints(run / CHECKPOINTS, keep=2).set_back(1)
    checkpoints = Checkpoints(run / CHECKPOINTS, keep=2)
    checkpoints.set_best(Best(step=2, value=0.9))
    config = load_config([DEMO], ["schedule.save_every=1", back]).config
    assert _begin(RunDirectory(run), checkpoints, config, 9).set_back
    assert checkpoints.best is None, "it was of a step that is trained again"
    RunDirectory(run).write_config(config.model_dump(mode="json"))
    for again in (back, "run.resume=auto"):
        found = _find(run, again)
        assert (found.set_back, found.first_step) == (False, 2)
        assert found.notes[0].startswith("resuming after step 1 (")


def test_only_a_damaged_checkpoint_that_is_named_is_an_error(other: Path, tmp_path: Path) -> None:
    newest = other / CHECKPOINTS / "step-00000002"
    (newest / POLICY / "common.pt").write_text("something else")
    with pytest.raises(RunDirectoryError, match=r"2 cannot be used: .* whole one is .*step-0*1$"):
        _find(tmp_path / "new", f"run.resume={newest}")
    found = _find(tmp_path / "new", f"run.resume={other}")
    assert found.first_step == 2
    assert "step-00000002 cannot be used: " in found.notes[0]


def test_a_run_of_other_settings_is_named(tmp_path: Path) -> None:
    seeded = _make_run(tmp_path / "seeded", "run.seed=9")
    notes = _find(tmp_path / "new", f"run.resume={seeded}").notes
    assert notes[1:] == (f"not as in {seeded}: run.seed was 9 and is 0",)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda config: config["schedule"].update(kind="sft"),
            "is of a run with schedule.kind=sft, and this one has sync: begin with its model",
        ),
        (
            lambda config: config["model"].update(path="/m"),
            "is of another model: model.path was '/m' and is ",
        ),
        (dict.clear, "the settings of its run are unknown: config.json is missing in "),
    ],
)
def test_a_run_that_cannot_be_gone_on_from(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    run = _make_run(tmp_path / "run", edit=edit)
    with pytest.raises(RunDirectoryError, match=said):
        _find(tmp_path / "new", f"run.resume={run}")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nowhere", "nowhere does not exist; it must be a run directory, or RUN/checkpoints/step"),
        ("other/metrics.jsonl", "metrics.jsonl has no checkpoint; it must be a run directory"),
        ("other/checkpoints/step-00000007", "step-00000007 does not exist"),
        ("other/checkpoints", "checkpoints has no checkpoint; it must be"),
        ("empty", "empty has no checkpoint; it must be a run directory"),
        ("verl", "has no checkpoint; .* a checkpoint of verl is exported to a model first"),
    ],
)
def test_a_path_that_leads_to_no_checkpoint(
    other: Path, tmp_path: Path, path: str, said: str
) -> None:
    (tmp_path / "empty" / CHECKPOINTS).mkdir(parents=True)
    (tmp_path / "verl" / "global_step_7" / "actor").mkdir(parents=True)
    with pytest.raises(RunDirectoryError, match=said):
        _find(tmp_path / "new", f"run.resume={tmp_path / path}")
