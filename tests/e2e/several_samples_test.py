"""A custom loop whose trajectories have two samples, in a whole run and a resumed one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
        f"data.train_files={rows}",
        "agent.loops.two_tries=two_tries:TwoTries",
        "schedule.val_every=null",
        "schedule.val_before_train=false",
        "schedule.save_every=1",
        "algorithm.loss_aggregation=seq-mean-token-mean",
        "algorithm.reward_kl.coef=0.5",
        "algorithm.reward_kl.control=adaptive",
        "algorithm.reward_kl.target=0.01",
        "algorithm.reward_kl.horizon=64",
    )


def test_every_sample_is_trained_on_and_a_resumed_run_learns_the_same(
    train: Callable[..., Trainer], arguments: tuple[str, ...]
) -> None:
    whole = train(*arguments, name="whole")
    for line in whole.metrics():
        assert line["rollout/num_trajectories"] == 16
        assert line["rollout/samples"] == 2
        assert line["sequences/trained"] == 2 * 16
        # The policy gives each trained token the probability that it was sampled with.
        assert line["rollout/logprob_diff_max"] < 1e-3
    for trajectory in whole.trajectories():
        one, two = trajectory["samples"]
        assert one["ids"][: one["spans"][0]["stop"]] == two["ids"][: two["spans"][0]["stop"]]
    assert any(t["samples"][0] != t["samples"][1] for t in whole.trajectories())

    # The KL is 0 as long as the policy is the reference; then the coefficient falls by a fifth
    # of 32 sequences / 64.
    first, second = whole.metrics()
    assert first["actor/reward_kl_penalty"] == 0.0 < abs(second["actor/reward_kl_penalty"])
    assert first["actor/reward_kl_penalty_coeff"] == 0.5
    assert second["actor/reward_kl_penalty_coeff"] == pytest.approx(0.45)

    folder = whole.run_dir.with_name("parts")  # the run as it is after its first step
    shutil.copytree(whole.run_dir, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000002")
    (folder / "checkpoints" / "latest").write_text("step-00000001")
    parts = train(*arguments, name="parts")
    assert "resuming after step 1" in parts.output
    for one, two in zip(whole.metrics(), parts.metrics(), strict=True):
        assert one["reward/mean"] == two["reward/mean"]
        for name in ("actor/reward_kl_penalty_coeff", "actor/reward_kl_penalty"):
            assert one[name] == pytest.approx(two[name], abs=1e-4)
        assert one["tokens/sampled"] == two["tokens/sampled"]
        assert one["actor/loss"] == pytest.approx(two["actor/loss"], abs=1e-4)
