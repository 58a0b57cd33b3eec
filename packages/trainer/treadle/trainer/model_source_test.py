import json
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.model_source import exported_model, resolve_model


def _checkpoint(run: Path, step: int, *, hf: bool) -> Path:
    directory = run / "checkpoints" / f"step-{step:08d}"
    directory.mkdir(parents=True)
    (directory / "state.json").write_text(json.dumps({"format": 1, "step": step, "metrics": {}}))
    (run / "checkpoints" / "latest").write_text(f"{directory.name}\n")
    if hf:
        (directory / "hf").mkdir()
        (directory / "hf" / "config.json").write_text("{}")
    return directory


def test_a_run_and_a_checkpoint_stand_for_the_model_that_they_hold(tmp_path: Path) -> None:
    first = _checkpoint(tmp_path, 3, hf=True)
    latest = _checkpoint(tmp_path, 7, hf=True)
    (tmp_path / "config.json").write_text("{}")  # the run's, not a model's
    assert resolve_model(tmp_path) == exported_model(tmp_path) == latest / "hf"
    assert resolve_model(first) == first / "hf"
    assert resolve_model(first / "hf") == first / "hf"


def test_a_run_without_a_model_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(SetupError, match="is a run directory without a checkpoint"):
        resolve_model(tmp_path)
    _checkpoint(tmp_path, 7, hf=False)
    assert exported_model(tmp_path) is None
    with pytest.raises(SetupError, match=r"step 7 in .*config.json.* `treadle export .* --step 7`"):
        resolve_model(tmp_path)  # whose settings are not there


def test_a_checkpoint_without_a_model_has_the_files_of_the_one_it_began_with(
    tmp_path: Path,
) -> None:
    checkpoint = _checkpoint(tmp_path, 7, hf=False)
    config = load_config([DEMO], []).config.model_dump(mode="json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve_model(tmp_path, weights=False) == resolve_model("demo:calculator")
    assert [path.name for path in checkpoint.iterdir()] == ["state.json"]


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"model\.path=/no/such/place does not exist"):
        resolve_model("/no/such/place")
    with pytest.raises(SetupError, match=r"holds no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="is a file"):
        resolve_model(tmp_path / "file")


def test_a_model_that_ships_has_a_name() -> None:
    assert resolve_model("demo:calculator") == DEMO.parent / "model"
    assert (resolve_model("demo:math_expression") / "model.safetensors").is_file()
    with pytest.raises(SetupError, match=r"no model\.path=demo:calc; there are: demo:calculator"):
        resolve_model("demo:calc")
