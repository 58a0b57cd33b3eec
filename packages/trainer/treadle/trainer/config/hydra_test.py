from pathlib import Path

import pytest

from treadle.trainer.config.load import ConfigError, LoadedConfig, load_config
from treadle.trainer.main import main

_FILE = """\
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, sizes, _self_]
data: {train_batch_size: 32}
actor_rollout_ref: {hybrid_engine: True, rollout: {n: 4}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(_FILE)
    sizes = "data: {max_prompt_length: 99, train_batch_size: 7}\n"
    (tmp_path / "sizes.yaml").write_text(sizes)
    return tmp_path


def _load(file: Path) -> LoadedConfig:
    return load_config([file], ["model.path=/m", "data.train_files=/t.jsonl"])


def test_a_file_stands_on_those_that_it_lists(folder: Path) -> None:
    loaded = _load(folder / "recipe.yaml")
    assert loaded.config.rollout.prompt_length == 99
    assert loaded.config.data.prompts_per_step == 32
    assert loaded.config.rollout.samples_per_prompt == 4
    assert loaded.sources["rollout.prompt_length"] == str(folder / "sizes.yaml")


def test_a_list_that_begins_with_the_file_itself_is_below_the_others(folder: Path) -> None:
    file = folder / "recipe.yaml"
    file.write_text(_FILE.replace("ppo_trainer, sizes, _self_", "_self_, sizes"))
    assert _load(file).config.data.prompts_per_step == 7


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("[nowhere]", r"defaults has 'nowhere', and only ppo_trainer, "),
        ("[{model: big}]", r"defaults has {'model': 'big'}, and only"),
        ("sizes", "defaults='sizes' is not a list"),
        ("[recipe]", "its defaults lead back to itself"),
    ],
)
def test_what_a_list_cannot_have(defaults: str, message: str, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(f"defaults: {defaults}\n")
    with pytest.raises(ConfigError, match=message):
        _load(folder / "recipe.yaml")


def test_the_options_of_verls_scripts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--print-config", "model.path=/m", "data.train_files=/t.jsonl"]
    named = [f"--config-path={folder}", "--config-name=recipe"]
    assert main([*given, *named, "rollout.samples_per_prompt=2"]) == 0
    said = capsys.readouterr().out
    assert "data.prompts_per_step" in said
    assert str(folder / "recipe.yaml") in said
    assert main([*given, "--config-name=ppo_trainer"]) == 0
    capsys.readouterr()
    assert main([*given, f"--config-path={folder}", "--config-name=none"]) == 2
    assert f"there is no file {folder / 'none.yaml'}" in capsys.readouterr().err
    assert main([*given, f"--config-path={folder}"]) == 2
    assert "needs --config-name=NAME" in capsys.readouterr().err
