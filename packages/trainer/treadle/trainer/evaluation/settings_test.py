from pathlib import Path
from typing import Any

import pytest

from treadle.trainer.config.load import ConfigError, load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.evaluation.settings import Settings, load_settings
from treadle.trainer.evaluation.source import Source

MODEL = Source(text="m", model="/models/m")
DEMO_MODEL = Source(text="demo:calculator", model="demo:calculator")
SERVER = Source(text="h:1", address="h:1")


def load(source: Source, *overrides: str, files: Any = (), **given: Any) -> Settings:
    return load_settings(source, files=files, overrides=overrides, **given)


def test_a_model_with_data_needs_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = load(MODEL, data=['odd "name", [1].jsonl', "b.jsonl"]).config
    assert config.data.val_files == (Path('/odd "name", [1].jsonl'), Path("/b.jsonl"))
    assert config.data.train_files == config.data.val_files
    assert config.model.path == Path("/models/m")


def test_the_model_of_the_demo_brings_the_demo() -> None:
    for settings in (load(DEMO_MODEL), load(SERVER, "model.path=demo:calculator")):
        assert settings.config.agent.tool_catalogue == DEMO.parent / "tools.yaml"
        assert settings.config.data.train_files == (DEMO.parent / "train.jsonl",)
        assert settings.config.model.path == Path("demo:calculator")
        assert settings.notes == ()


def test_the_configuration_of_a_run_is_the_base(tmp_path: Path) -> None:
    limited = load_config([DEMO], ["data.max_val_rows=8", "run.seed=3"]).config
    saved = tmp_path / "config.json"
    saved.write_text(limited.model_dump_json())
    source = Source(text="run", model="/step-40/hf", run=tmp_path, step=40, config=saved)
    config = load(source).config
    assert (config.run.seed, config.data.max_val_rows) == (3, 8)
    assert config.model.path == Path("/step-40/hf")
    assert load(source, "run.seed=4", limit=5).config.run.seed == 4
    assert load(source, limit=5).config.data.max_val_rows == 5
    assert load(source, data=["/x.jsonl"]).config.data.max_val_rows is None


def test_servers_that_hold_other_weights_take_no_part() -> None:
    addresses = "rollout.addresses=[gpu3:8000, gpu4:8000]"
    settings = load(DEMO_MODEL, addresses)
    rollout = settings.config.rollout
    assert (rollout.addresses, rollout.num_replicas) == ((), 1)
    (note,) = settings.notes
    assert note.startswith("rollout.addresses=[gpu3:8000, gpu4:8000] is left out: those servers")
    assert load(SERVER, "model.path=demo:calculator", addresses).notes == ()


def test_several_samples_at_temperature_0_are_remarked_on() -> None:
    settings = load(DEMO_MODEL, samples=4)
    assert settings.config.rollout.val.samples_per_prompt == 4
    assert "the 4 samples of a row are the same" in settings.notes[0]
    assert load(DEMO_MODEL, "rollout.val.temperature=1", samples=4).notes == ()


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (MODEL, [], "no data to evaluate on: give --data FILE"),
        (MODEL, ["model.path=/other"], "model.path=/other contradicts m"),
        (SERVER, [], "h:1 serves tokens, and prompts are rendered here: give --config FILE"),
        (SERVER, ["model.path=/m"], "no data to evaluate on"),
        (DEMO_MODEL, ["rollout.val.temprature=1"], "unknown key rollout.val.temprature"),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    source: Source, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(source, *overrides)
