"""PPO with a critic and a custom loop whose trajectories have two samples, and a resumed run.

All processes are real. The critic learns alone in the first step, the KL is charged to the reward.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from treadle.trainer.demo import DEMO

from .testing import Trainer

pytestmark = pytest.mark.timeout(600)

_LOOP = '''
from treadle.agent_loop import Conversation, Toolbox, ToolAgentLoop


class TwoTries:
    """Two conversations about the same question; the second one counts."""

    async def run(self, task, services):
        loop, limits = ToolAgentLoop(), services.limits
        async with Toolbox(task, services.tools, limits, codec=services.renderer) as toolbox:
            with Conversation(task, services, tools=toolbox.specs) as first:
                await loop.converse(first, toolbox, limits)
                second = first.another(task.messages, tools=toolbox.specs)
                stop = await loop.converse(second, toolbox, limits)
                return second.finish(stop, tool_rewards=toolbox.rewards)
'''


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Arguments for rows that name a custom loop, which only the driver can import."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "two_tries.py").write_text(_LOOP, encoding="utf-8")
    monkeypatch.syspath_prepend(modules)
    lines = (DEMO.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:64]
    rows = tmp_path / "rows.jsonl"
    with rows.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(json.loads(line) | {"agent_name": "two_tries"}) + "\n")
    return (
        *(f"data.train_files={rows}", "agent.loops.two_tries=two_tries:TwoTries"),
        *("algorithm.advantage=gae", "algorithm.lam=0.95", "algorithm.mini_batches=2"),
        *("critic.optimizer.lr=1e-3", "critic.warmup_steps=1"),
        *("schedule.total_steps=3", "schedule.val_every=null", "schedule.val_before_train=false"),
        *("schedule.save_every=1", "schedule.save_hf=every", "schedule.keep_checkpoints=3"),
        "algorithm.loss_aggregation=seq-mean-token-mean",
        *("algorithm.reward_kl.coef=0.5", "algorithm.reward_kl.control=adaptive"),
        *("algorithm.reward_kl.target=0.01", "algorithm.reward_kl.horizon=64"),
    )


def _learned(line: dict[str, Any]) -> dict[str, Any]:
    """Returns what depends on the sampled tokens and on the weights, and not on the clock."""
    prefixes = ("critic/", "actor/", "reward/", "tokens/")
    return {k: v for k, v in line.items() if k.startswith(prefixes) and not k.endswith("_s")}


def _weights(run: Trainer, step: int) -> bytes:
    folder = run.run_dir / "checkpoints" / f"step-{step:08d}" / "hf"
    return (folder / "model.safetensors").read_bytes()


def test_a_critic_warms_up_every_sample_is_trained_on_and_a_resumed_run_learns_the_same(
    train: Callable[..., Trainer], arguments: tuple[str, ...]
) -> None:
    whole = train(*arguments, name="whole")
    lines = [dict(line) for line in whole.metrics()]
    _check_critic(whole, lines)
    _check_samples(whole, lines)
    _check_charged_kl(lines)

    folder = whole.run_dir.with_name("parts")  # the run as it is after its second step
    shutil.copytree(whole.run_dir, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000003")
    (folder / "checkpoints" / "latest").write_text("step-00000002")
    # It shares its devices and leaves them to the servers, which changes no bit.
    offload = [f"policy.offload.{name}=true" for name in ("parameters", "optimizer", "reference")]
    parts = train(*arguments, *offload, "rollout.release_memory=true", name="parts")
    assert "resuming after step 2" in parts.output
    last = parts.metrics()[-1]
    assert 0 < last["offload/host_bytes"] < last["offload/freed_bytes"]
    assert [_learned(dict(line)) for line in parts.metrics()] == list(map(_learned, lines))
    assert _weights(parts, 3) == _weights(whole, 3)


def _check_critic(whole: Trainer, lines: list[dict[str, Any]]) -> None:
    assert "learns alone for 1 steps" in whole.output
    for line in lines:
        assert line["critic/updates"] == 2
        assert line["critic/vf_loss"] > 0
        assert 0 < line["time/values_s"] < line["time/step_s"]
    assert lines[0]["critic/values_mean"] == 0  # the head begins there
    assert lines[1]["critic/values_mean"] != 0
    assert ["actor/loss" in line for line in lines] == [False, True, True]
    start = load_file(DEMO.parent / "model" / "model.safetensors")
    warm = load(_weights(whole, 1))
    assert all(torch.equal(warm[name], tensor) for name, tensor in start.items())
    assert _weights(whole, 1) != _weights(whole, 2) != _weights(whole, 3)


def _check_samples(whole: Trainer, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/samples"] == 2
        assert line["sequences/trained"] == 2 * 16
    for line in lines[1:]:  # the policy is trained
        # It gives each trained token the probability that it was sampled with.
        assert line["rollout/logprob_diff_max"] < 1e-3
    for trajectory in whole.trajectories():
        one, two = trajectory["samples"]
        assert one["ids"][: one["spans"][0]["stop"]] == two["ids"][: two["spans"][0]["stop"]]
    assert any(t["samples"][0] != t["samples"][1] for t in whole.trajectories())


def _check_charged_kl(lines: list[dict[str, Any]]) -> None:
    """The KL is 0 as long as the policy is the reference, and the coefficient falls meanwhile.

    By a fifth of 32 sequences / 64 in each step; of the third step's KL the fourth would know.
    """
    penalties = [line["actor/reward_kl_penalty"] for line in lines]
    assert penalties[:2] == [0.0, 0.0] and abs(penalties[2]) > 0
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines]
    assert coefficients == pytest.approx([0.5, 0.45, 0.405])
