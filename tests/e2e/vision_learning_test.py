"""A model that sees learns to look: which colour is the square?

Imitation of guesses teaches it the four words, and nothing of the images; then reward does.
"""

from pathlib import Path
from statistics import fmean

import pytest

from treadle.trainer.main import main

from .seeing import REWARD, metrics_of, write_conversations, write_rows, write_seeing_model
from .testing import Trainer

pytestmark = pytest.mark.timeout(1200)


def test_reward_teaches_a_model_to_look(tmp_path: Path) -> None:
    write_seeing_model(tmp_path / "model")
    write_conversations(tmp_path / "guesses.parquet", 512)
    write_rows(tmp_path / "train.parquet", 256)
    write_rows(tmp_path / "val.parquet", 64, seed=1)
    (tmp_path / "reward.py").write_text(REWARD)
    imitation = [
        f"model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'guesses.parquet'}",
        f"run.dir={tmp_path / 'sft'}",
        "data.max_length=100",
        "data.batch_size=32",
        "schedule.total_steps=32",
        "policy.optimizer.lr=3e-3",
    ]
    assert main(["sft", *imitation]) == 0
    trainer = Trainer(
        tmp_path / "run",
        [
            f"model.path={tmp_path / 'sft'}",
            f"data.train_files={tmp_path / 'train.parquet'}",
            f"data.val_files={tmp_path / 'val.parquet'}",
            f"reward.name={tmp_path / 'reward.py'}:score",
            "data.prompts_per_step=16",
            "rollout.samples_per_prompt=8",
            "rollout.max_in_flight=128",
            "rollout.prompt_length=100",
            "rollout.response_length=4",
            "rollout.threads=1",
            "launch.policy_threads=1",
            "policy.optimizer.lr=3e-3",
            "policy.optimizer.weight_decay=0",
            "schedule.total_steps=32",
            "schedule.val_every=32",
        ],
    )
    assert trainer.wait() == 0, trainer.output
    reward = metrics_of(trainer.run_dir, "reward/mean", range(1, 33))
    assert fmean(reward[:4]) < 0.4
    # One in four is right by guessing. The curve goes up and down by 0.2, and another processor's
    # rounding gives another curve.
    assert fmean(reward[-8:]) > 0.5
    before, after = metrics_of(trainer.run_dir, "val/reward", [0, 32])
    assert before < 0.45 and after > 0.5
    assert max(metrics_of(trainer.run_dir, "rollout/logprob_diff_max", range(1, 33))) < 1e-3
