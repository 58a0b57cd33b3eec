"""The demo learns on a real engine as on the embedded one, and with other seeds too.

The engine samples what the embedded one would, so one run shows both. Two servers share the work,
lend their memory to the policy in every step, and one is killed on the way.
"""

import os
import signal

import pytest

from .testing import StartTrainer, server_command

pytestmark = pytest.mark.timeout(1800)
_STEPS = 16


@pytest.mark.parametrize(("engine", "seed"), [("vllm", 1), ("sglang", 2)], ids=["vllm", "sglang"])
def test_the_demo_learns_with_two_servers_of_which_one_is_killed(
    start_trainer: StartTrainer, engine: str, seed: int
) -> None:
    trainer = start_trainer(
        f"run.seed={seed}",
        f"rollout.name={engine}",
        server_command(engine),
        "rollout.num_replicas=2",
        "rollout.threads=1",
        "rollout.release_memory=true",
        "rollout.multi_stage_wake_up=true",
        f"schedule.total_steps={_STEPS}",
        f"schedule.val_every={_STEPS}",
        base=(),
    )
    trainer.read_until(f"step  4/{_STEPS}")
    os.kill(trainer.pid_of("rollout-1"), signal.SIGKILL)
    assert trainer.wait() == 0, trainer.output

    assert trainer.mean("tool/call_rate", range(1, 6)) <= 0.65
    assert trainer.mean("tool/call_rate", range(_STEPS - 3, _STEPS + 1)) >= 0.85
    assert trainer.mean("val/reward", [0]) <= 0.75
    # Runs of other seeds end between 0.97 and 1, and a server does not batch the same way twice.
    assert trainer.mean("val/reward", [_STEPS]) >= 0.9

    steps = [line for line in trainer.metrics() if line["step"]]
    assert [line["weights/version"] for line in steps] == list(range(1, _STEPS + 1))
    assert {line["rollout/num_failed"] for line in steps} == {0}
    measured = [line for line in steps if "rollout/logprob_diff_max" in line]
    assert len(measured) >= _STEPS // 2  # once all rewards are equal nothing is computed
    assert max(line["rollout/logprob_diff_max"] for line in measured) < 1e-4

    assert "started again: rollout-1" in trainer.output
    assert sum(line["servers/lost"] for line in steps) == 1
    assert [line["servers/live"] for line in steps] == [2] * _STEPS
    report = (trainer.run_dir / "report.html").read_text(encoding="utf-8")
    assert "1 lost, 1 started again" in report
    for line in trainer.trajectories():
        expected = line["step"] if line["phase"] == "val" else line["step"] - 1
        versions = {
            span["weight_version"]
            for sample in line["samples"]
            for span in sample["spans"]
            if span["origin"] == "sampled"
        }
        assert versions == {expected}
