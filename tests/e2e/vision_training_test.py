"""`treadle` on a model that sees: rows with images, the torch engine's servers, a trained tower."""

import json
from pathlib import Path

import pytest

from treadle.trainer.main import main

from .seeing import REWARD, metrics_of, write_conversations, write_rows, write_seeing_model
from .testing import SMALL, Trainer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("squares")
    write_seeing_model(path / "model", "qwen3_vl")
    write_rows(path / "train.parquet", 8)
    write_rows(path / "val.parquet", 4, seed=1)
    (path / "reward.py").write_text(REWARD)
    return path


def settings(folder: Path) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
        f"reward.name={folder / 'reward.py'}:score",
        "rollout.prompt_length=100",
        "rollout.response_length=12",
        *SMALL,
    ]


def test_what_is_trained_is_served(folder: Path, tmp_path: Path) -> None:
    """Two steps with the tower trained and a reference: servers and policy agree in both.

    A random model earns no reward, so that only the KL and the entropy bonus teach it something;
    a rate of 0.01 moves every weight far.
    """
    trainer = Trainer(
        tmp_path / "run",
        [
            *settings(folder),
            "policy.freeze_vision_tower=false",
            "policy.optimizer.lr=0.01",
            "algorithm.entropy_coef=0.1",
            "algorithm.kl_coef=0.1",
        ],
    )
    assert trainer.wait() == 0, trainer.output
    assert max(metrics_of(trainer.run_dir, "rollout/logprob_diff_max", [1, 2])) < 1e-4
    assert metrics_of(trainer.run_dir, "actor/kl_loss", [2])[0] > 1e-3
    assert main(["export", str(trainer.run_dir), str(tmp_path / "out")]) == 0
    from safetensors.torch import load_file

    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not before[name].equal(after[name])}
    assert any(name.startswith("model.visual.deepstack_merger_list.") for name in moved)
    assert any(name.startswith("model.language_model.") for name in moved)
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


def test_a_model_that_reads_text_only_refuses_the_rows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*settings(folder), "model.path=demo:calculator", f"run.dir={tmp_path / 'run'}"]
    assert main(["--dry-run", *asked]) == 2
    assert (
        "row 1: the column 'images' holds 1 of them, and model.path reads text only"
        in capsys.readouterr().err
    )


def test_conversations_with_images_are_imitated(folder: Path, tmp_path: Path) -> None:
    write_conversations(tmp_path / "train.parquet", 16)
    run_dir = tmp_path / "run"
    asked = [
        f"model.path={folder / 'model'}",
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"run.dir={run_dir}",
        "data.max_length=100",
        "data.batch_size=16",
        "schedule.total_steps=3",
        "policy.optimizer.lr=0.01",
    ]
    assert main(["sft", *asked]) == 0
    losses = metrics_of(run_dir, "train/loss", [1, 2, 3])
    assert losses[2] < losses[0]
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["vision_config"]["depth"] == 2
