"""The schedules that sample beside training: whole runs, killed and resumed."""

import os
import signal
from pathlib import Path

import pytest

from .testing import StartTrainer, trained_rows

pytestmark = pytest.mark.timeout(600)
_STEPS, _PROMPTS, _SAMPLES = 6, 4, 4
_FAKE = (
    f"schedule.total_steps={_STEPS}",
    "schedule.save_every=1",
    "schedule.save_hf=never",
    "schedule.val_every=null",
    "schedule.val_before_train=false",
    *("rollout.name=fake", "policy.backend=fake"),
    "data.shuffle=false",
)
_ASYNC = (
    "schedule.kind=async",
    "schedule.max_staleness=1",
    "sync.in_flight=interrupt",
    "algorithm.correction.weights=token",
    *_FAKE,
)


def test_a_killed_run_trains_on_every_row_once(start_trainer: StartTrainer, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def alone(trajectory, data_source): return trajectory.task.rollout_index\n"
        "def together(trajectories): return [len(trajectories) for _ in trajectories]\n"
    )
    names = ", ".join(f"{tmp_path}/own.py:{name}" for name in ("alone", "together"))
    own = (*_ASYNC, f"reward.name=[{names}]", "reward.weights.together=0.5")
    killed = start_trainer(*own)
    killed.read_until(" 3/6")
    os.kill(killed.pid_of("rollout-0"), signal.SIGKILL)  # it is replaced while groups are sampled
    killed.read_until(" 4/6")
    killed.process.kill()
    killed.process.wait()
    resumed = start_trainer(*own)
    resumed.read_until("of the groups that were begun")
    assert resumed.wait() == 0, resumed.output
    rows = range(_STEPS * _PROMPTS)
    assert trained_rows(resumed) == {f"train/{row}": _SAMPLES for row in rows}
    lines = [line for line in resumed.metrics() if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, _STEPS + 1))
    assert sum(line["servers/restarted"] for line in lines) == 1
    assert max(line["staleness/max"] for line in lines) == 1
    assert all(line["rollout/num_failed"] == 0 for line in lines)
    for name, value in (("mean", 1.5 + 0.5 * 4), ("alone", 1.5), ("together", 4)):
        assert {line[f"reward/{name}"] for line in lines} == {value}
    for process in ("servers", "policy"):
        shares = [
            [line[name] for name in line if name.startswith(f"{process}/time_share/")]
            for line in lines
        ]
        # The line of a step whose checkpoint was complete when the run was killed may lack them.
        whole = [each for each in shares if each]
        assert len(whole) >= _STEPS - 1
        assert [sum(each) for each in whole] == pytest.approx([1.0] * len(whole))
    assert any(line.get("servers/time_share/down", 0.0) > 0.01 for line in lines)
    assert not list((resumed.run_dir / "groups").iterdir()), "all of them were trained on"
    for line in resumed.trajectories():
        spans = [span for span in line["samples"][-1]["spans"] if span["origin"] == "sampled"]
        versions = [span["weight_version"] for span in spans]
        assert versions == sorted(versions)
        assert line["step"] - 2 <= versions[0] <= versions[-1] < line["step"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reward_that_always_raises_ends_the_run_in_its_first_step(
    kind: str, start_trainer: StartTrainer, tmp_path: Path
) -> None:
    reward = tmp_path / "wrong.py"
    reward.write_text("def score(data_source, solution_str, ground_truth):\n    return {}['a']\n")
    own = (
        f"reward.name={reward}:score",
        "agent.max_consecutive_failures=3",
        "agent.try_once=false",
    )
    in_turn = ("rollout.max_in_flight=1", "data.prompts_per_step=8")
    run = start_trainer(*(_ASYNC if kind == "async" else _FAKE), *own, *in_turn)
    assert run.wait() == 1, run.output
    assert f"({reward}:2, in score)), and never served one (agent.max_cons" in run.output
    assert 3 <= len(run.trajectories()) < 16  # of 32: those that came while the third one failed
