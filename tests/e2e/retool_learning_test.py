"""ReTool at tiny scale learns: to write programs by imitation, and to game the original reward.

The second is the false convergence that `reward/wrong_with_many_turns` is there for: on tasks that
the model cannot solve, the reward rises because the number of turns does.
"""

import json
from pathlib import Path
from statistics import fmean

import pytest
from retool import false_convergence
from retool.tiny_tasks import data_files

from treadle.trainer.main import main as treadle

pytestmark = pytest.mark.timeout(900)
_EXAMPLE = Path(false_convergence.__file__).parent
_SFT_STEPS, _RL_STEPS = 100, 8


def _values(run: Path, metric: str) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[metric] for line in lines if metric in line]


def test_the_original_reward_rises_without_a_right_answer(tmp_path: Path) -> None:
    num_rows = {"sft_train": 16 * _SFT_STEPS, "sft_val": 32, "hard": 8 * _RL_STEPS}
    for name, rows in data_files(seed=0, num_rows=num_rows).items():
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tuned = tmp_path / "tuned"
    assert not treadle(
        [
            *("sft", f"--config={_EXAMPLE / 'tiny_sft.yaml'}", f"run.dir={tuned}"),
            *(f"schedule.total_steps={_SFT_STEPS}", f"policy.optimizer.decay_steps={_SFT_STEPS}"),
            *(f"data.train_files={tmp_path / 'sft_train.jsonl'}", "schedule.save_every=null"),
            *(f"data.val_files={tmp_path / 'sft_val.jsonl'}", "schedule.val_every=100"),
        ]
    )
    losses = _values(tuned, "val/loss")
    assert losses[-1] < 0.1 * losses[0]

    run = tmp_path / "shaped"
    hard = tmp_path / "hard.jsonl"
    assert not treadle(
        false_convergence.arguments_of("shaped", model=tuned, data=hard, run=run, steps=_RL_STEPS),
    )
    turns, rewards = _values(run, "rollout/turns"), _values(run, "reward/mean")
    assert fmean(turns[-2:]) > fmean(turns[:2]) + 1
    assert fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.05
    assert max(_values(run, "reward/accuracy")) < 0.05
