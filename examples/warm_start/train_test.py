import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from treadle.trainer import demo
from warm_start.recipe import Recipe
from warm_start.train import RECIPES, main, warm_start


def _short(recipe: Recipe) -> Recipe:
    stages = tuple(replace(stage, num_steps=2, batch_size=2) for stage in recipe.stages)
    return replace(recipe, stages=stages)


@pytest.mark.parametrize("name", RECIPES)
def test_a_short_warm_start_writes_a_model_that_loads_twice_the_same(
    tmp_path: Path, name: str
) -> None:
    recipe = _short(RECIPES[name])
    skills = [warm_start(recipe, tmp_path / out, seed=3, num_measured=4) for out in ("a", "b")]
    assert skills[0] == skills[1]
    assert 0 <= skills[0].call_rate < 0.1
    assert skills[0].greedy_accuracy == 0.0
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert [str(file) for file in files] == [
        "model/chat_template.jinja",
        "model/config.json",
        "model/generation_config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "train.jsonl",
        "val.jsonl",
    ]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    weights = load_file(tmp_path / "a" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
    assert model.config.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 919_680


def test_a_folder_that_exists_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["calculator", "--out", str(tmp_path)])
    assert exit_.value.code == 2
    assert "name a folder that does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_the_shipped_rows_are_the_recipes(name: str) -> None:
    for file, rows in RECIPES[name].rows().items():
        shipped = (Path(demo.__file__).parent / name / file).read_text().splitlines()
        assert [json.loads(line) for line in shipped] == list(rows)
