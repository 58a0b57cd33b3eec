"""Which changed settings make another run."""

import shutil
from pathlib import Path
from typing import Any

from treadle.trainer.checkpoint.resume_check import compare


def _dumped(model: Path, rows: Path, **run: object) -> dict[str, Any]:
    return {
        "data": {"train_files": [str(rows)], "prompts_per_step": 4},
        "model": {"path": str(model)},
        "policy": {"optimizer": {"lr": 1e-4}},
        "run": {"dir": "runs/a", "seed": 0, **run},
    }


def _files(root: Path) -> tuple[Path, Path]:
    model = root / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (root / "train.jsonl").write_text("{}\n")
    return model, root / "train.jsonl"


def test_the_directory_is_no_part_of_the_run(tmp_path: Path) -> None:
    here = _files(tmp_path / "here")
    changes = compare(_dumped(*here), _dumped(*here, dir="elsewhere"))
    assert (changes.breaking, changes.allowed) == ([], [])


def test_a_seed_makes_another_run_and_a_learning_rate_does_not(tmp_path: Path) -> None:
    here = _files(tmp_path / "here")
    later = _dumped(*here, seed=1)
    later["policy"] = {"optimizer": {"lr": 1e-5}}
    changes = compare(_dumped(*here), later)
    assert changes.breaking == ["run.seed was 0 and is 1"]
    assert changes.allowed == ["policy.optimizer.lr was 0.0001 and is 1e-05"]


def test_the_same_files_in_another_place_are_the_same_run(tmp_path: Path) -> None:
    here = _files(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = (tmp_path / "there" / "model", tmp_path / "there" / "train.jsonl")
    assert compare(_dumped(*here), _dumped(*there)).breaking == []

    (there[0] / "model.safetensors").write_bytes(b"weighty")
    there[1].write_text('{"a": 1}\n')
    keys = [line.split()[0] for line in compare(_dumped(*here), _dumped(*there)).breaking]
    assert keys == ["data.train_files", "model.path"]


def test_a_missing_or_added_file_makes_another_run(tmp_path: Path) -> None:
    here = _files(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    there = (tmp_path / "there" / "model", tmp_path / "there" / "train.jsonl")
    (there[0] / "added.json").write_text("{}")
    assert len(compare(_dumped(*here), _dumped(*there)).breaking) == 1
    shutil.rmtree(tmp_path / "here")
    assert len(compare(_dumped(*here), _dumped(*there)).breaking) == 2


def test_an_entry_that_was_taken_away_is_a_change(tmp_path: Path) -> None:
    here = _files(tmp_path / "here")
    before, after = _dumped(*here), _dumped(*here)
    before["agent"] = {"loops": {"mine": "m:A"}, "forgotten": 1}
    after["agent"] = {"loops": {}}
    assert compare(before, after).allowed == ["agent.loops.mine was 'm:A' and is None"]


def test_a_setting_that_an_older_release_did_not_have_counts_as_its_default(tmp_path: Path) -> None:
    then = _dumped(*_files(tmp_path))
    now = {**then, "algorithm": {"advantage": "grpo", "gamma": 1.0}}
    assert compare({**then, "algorithm": {"kind": "grpo"}}, now).breaking == []
    assert compare({**then, "algorithm": {"kind": "grpo"}}, now).allowed == []
    now["algorithm"] = {"advantage": "rloo"}
    assert compare(then, now).breaking == ["algorithm.advantage was 'grpo' and is 'rloo'"]
