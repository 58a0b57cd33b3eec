import json
from pathlib import Path

import pytest

from treadle.trainer.config.load import load_config
from treadle.trainer.demo import DEMO
from treadle.trainer.main import main


def _run(path: Path, *, steps: tuple[int, ...]) -> Path:
    """Makes a run directory whose checkpoints hold Hugging Face directories."""
    path.mkdir()
    config = load_config([DEMO], []).config.model_dump(mode="json")
    (path / "config.json").write_text(json.dumps(config))
    (path / "metrics.jsonl").write_text('{"step": 0}\n')
    for step in steps:
        checkpoint = path / "checkpoints" / f"step-{step:08d}"
        (checkpoint / "hf").mkdir(parents=True)
        (checkpoint / "hf" / "model.safetensors").write_bytes(b"%d" % step)
        (checkpoint / "hf" / "tokenizer.json").write_text("{}")
        (checkpoint / "hf" / "optimizer.pt").write_text("of the start model's folder")
        state = {"format": 1, "step": step, "metrics": {"reward/mean": step / 10, "x": 1.0}}
        (checkpoint / "state.json").write_text(json.dumps(state))
        (path / "checkpoints" / "latest").write_text(checkpoint.name)
    return path


def test_the_latest_model_or_that_of_a_step_is_written_with_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", steps=(3, 7))
    assert main(["export", str(run), str(tmp_path / "out" / "latest")]) == 0
    assert (tmp_path / "out" / "latest" / "model.safetensors").read_bytes() == b"7"
    assert "the model of step 7" in capsys.readouterr().out
    assert main(["export", str(run), str(tmp_path / "third"), "--step=3"]) == 0
    assert (tmp_path / "third" / "model.safetensors").read_bytes() == b"3"
    assert {file.name for file in (tmp_path / "third").iterdir()} == {
        *("README.md", "model.safetensors", "tokenizer.json"),
    }
    card = (tmp_path / "third" / "README.md").read_text()
    assert "step 3, in float32" in card
    assert "| `reward/mean` | 0.3 |" in card
    assert "`x`" not in card


def test_an_adapter_is_written_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "run", steps=(3,))
    config = load_config([DEMO], ["policy.lora.rank=2"]).config.model_dump(mode="json")
    (run / "config.json").write_text(json.dumps(config))
    adapter = run / "checkpoints" / "step-00000003" / "hf" / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert main(["export", str(run), str(tmp_path / "out"), "--adapter"]) == 0
    assert "wrote the adapter of step 3" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"adapter_config.json", "README.md"}
    assert '"peft"' in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "there"], "there exists: choose another place"),
        (["run", "out", "--step=5"], "no checkpoint of step 5"),
        (["run", "out", "--adapter"], "run has no adapter: policy.lora.rank is 0"),
        (["there", "out"], "there is not a run directory"),
        (["empty", "out"], "empty holds no checkpoint"),
        (["run", "out", "--push-to-hub=mine"], "'mine' is not a repository on the Hub"),
    ],
)
def test_what_cannot_be_exported_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "run", steps=(3, 7))
    _run(tmp_path / "empty", steps=())
    (tmp_path / "there").mkdir()
    assert main(["export", *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
