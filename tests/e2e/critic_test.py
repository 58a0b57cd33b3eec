"""PPO with a critic: its warm-up, its metrics, and a resume, with all processes real."""

import shutil
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, load_file

from treadle.trainer.demo import DEMO

from .testing import Trainer


def _learned(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what depends on the sampled tokens and on the weights, and not on the clock."""
    prefixes = ("critic/", "actor/", "reward/", "tokens/")
    return {k: v for k, v in line.items() if k.startswith(prefixes) and not k.endswith("_s")}


def test_a_critic_warms_up_learns_and_resumes_exactly(train: Callable[..., Trainer]) -> None:
    arguments = (
        *("algorithm.advantage=gae", "algorithm.lam=0.95", "algorithm.mini_batches=2"),
        *("critic.optimizer.lr=1e-3", "critic.warmup_steps=1"),
        *("schedule.total_steps=3", "schedule.val_every=null", "schedule.val_before_train=false"),
        *("schedule.save_every=1", "schedule.save_hf=every", "schedule.keep_checkpoints=3"),
    )
    whole = train(*arguments, name="whole")
    assert "learns alone for 1 steps" in whole.output
    lines = [dict(line) for line in whole.metrics()]
    for line in lines:
        assert line["critic/updates"] == 2
        assert line["critic/vf_loss"] > 0
        assert 0 < line["time/values_s"] < line["time/step_s"]
    assert lines[0]["critic/values_mean"] == 0  # the head begins there
    assert lines[1]["critic/values_mean"] != 0
    assert ["actor/loss" in line for line in lines] == [False, True, True]

    def weights(run: Trainer, step: int) -> bytes:
        folder = run.run_dir / "checkpoints" / f"step-{step:08d}" / "hf"
        return (folder / "model.safetensors").read_bytes()

    start = load_file(DEMO.parent / "model" / "model.safetensors")
    warm = load(weights(whole, 1))
    assert all(torch.equal(warm[name], tensor) for name, tensor in start.items())
    assert weights(whole, 1) != weights(whole, 2) != weights(whole, 3)

    shutil.copytree(whole.run_dir, whole.run_dir.with_name("parts"))
    checkpoints = whole.run_dir.with_name("parts") / "checkpoints"
    shutil.rmtree(checkpoints / "step-00000003")
    (checkpoints / "latest").write_text("step-00000002")
    # It shares its devices and leaves them to the servers, which changes no bit.
    offload = [f"policy.offload.{name}=true" for name in ("parameters", "optimizer", "reference")]
    parts = train(*arguments, *offload, "rollout.release_memory=true", name="parts")
    assert "resuming after step 2" in parts.output
    last = parts.metrics()[-1]
    assert 0 < last["offload/host_bytes"] < last["offload/freed_bytes"]
    assert [_learned(dict(line)) for line in parts.metrics()] == list(map(_learned, lines))
    assert weights(parts, 3) == weights(whole, 3)
