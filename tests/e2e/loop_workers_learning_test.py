"""Loop workers: the same trajectories as without them, also when one of them and the router die.

And that an evaluation runs on them. Each schedule runs on them in the soak.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from treadle.agent_loop import SpanTable
from treadle.tracing.trajectories import SCHEMA, TrajectoryFiles
from treadle.trainer.main import main
from treadle.trainer.rollout.workers.trajectory_codec import PackedMessages

from .testing import StartTrainer, Trainer

pytestmark = pytest.mark.timeout(600)
_RUN = (
    "schedule.total_steps=3",
    "schedule.val_every=null",
    "schedule.save_last=false",
    "tracing.backends=[jsonl]",
)


def test_workers_give_what_the_driver_would_also_when_one_dies(start_trainer: StartTrainer) -> None:
    alone = start_trainer(*_RUN, name="alone")
    helped = start_trainer(*_RUN, "agent.num_workers=2", name="helped")
    helped.read_until("step 1/3")
    os.kill(helped.pid_of("worker-0"), signal.SIGKILL)
    os.kill(helped.pid_of("router"), signal.SIGKILL)
    assert helped.wait() == 0, helped.output
    assert alone.wait() == 0, alone.output
    assert _kept(helped) == _kept(alone)
    assert _stored(helped) == _stored(alone)
    lost = [line["workers/lost"] for line in helped.metrics()]
    assert (sum(lost), lost[0]) == (1, 0), "the one that was killed after the first step"
    assert all(line["rollout/num_failed"] == 0 for line in helped.metrics() if line["step"])
    assert not any("workers/live" in line for line in alone.metrics())
    of_steps = [line for line in helped.metrics() if line["step"] > 1]
    shares = [[line[n] for n in line if n.startswith("servers/time_share/")] for line in of_steps]
    assert [sum(each) for each in shares] == pytest.approx([1.0] * len(of_steps))
    waited = max(line["servers/time_share/tools"] for line in of_steps)
    assert waited > 0.0, "of the calculator's turns the router tells"
    log = (helped.run_dir / "logs" / "trainer.log").read_text(encoding="utf-8")
    assert "loop worker worker-0 (pid " in log
    assert "was ended by SIGKILL on node " in log and "; its log ends with:" in log
    assert "the router (127.0.0.1:" in log
    assert _spans(helped) >= _spans(alone), "attempts that were lost may have left some more"


def test_a_step_makes_no_object_of_a_turn_in_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Counter[type] = Counter()

    def count(source: type[PackedMessages] | type[SpanTable]) -> None:
        make = source.make

        def counted(self: Any) -> Any:
            made[source] += 1
            return make(self)

        monkeypatch.setattr(source, "make", counted)

    count(PackedMessages)
    count(SpanTable)
    few = ("schedule.total_steps=2", "run.trajectories_per_step=3", "run.val_trajectories=0")
    assert main([*_RUN, *few, "agent.num_workers=2", f"run.dir={tmp_path}"]) == 0
    with TrajectoryFiles(tmp_path) as files:
        assert files.count() == 256 + 96
    lines = (tmp_path / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 16, "a group of 8 each step"
    assert made == {PackedMessages: 16, SpanTable: 16}, "what trajectories.jsonl shows, and no more"


def test_an_evaluation_runs_on_workers(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["eval", "demo:calculator", "--limit=4", "--samples=2", "--out", str(out)]
    arguments += ["rollout.val.temperature=1", "rollout.threads=1"]
    assert main([*arguments, "agent.num_workers=2"]) == 0
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert results["metrics"]["val/num_failed"] == 0
    lines = (out / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line)["task_id"] for line in lines) == [
        f"val/{row}" for row in range(4) for _ in range(2)
    ]
    assert sorted(path.name for path in (out / "logs").glob("worker-*.log")) == [
        "worker-0.log",
        "worker-1.log",
    ]


def _kept(trainer: Trainer) -> list[Mapping[str, Any]]:
    """Returns what a trajectory is, without times."""
    kept = ("step", "task_id", "rollout_index", "samples", "messages", "reward", "stop")
    return [{key: line[key] for key in kept} for line in trainer.trajectories()]


def _stored(trainer: Trainer) -> list[str]:
    """Returns the rows of the trajectory files, without times, as text: NaN equals nothing."""
    columns = [name for name in SCHEMA.names if name not in ("trace", "metrics", "duration_s")]
    with TrajectoryFiles(trainer.run_dir) as files:
        rows = files.query(columns=columns, order_by=["step", "task_id", "rollout_index"])
    for row in rows:
        for sample in row["samples"]:
            del sample["logprobs"]  # a server's rounding depends on what it computes together
    return list(map(repr, rows))


def _spans(trainer: Trainer) -> Counter[tuple[str, int]]:
    """Returns how many spans there are of each name and step."""
    text = (trainer.run_dir / "traces.jsonl").read_text(encoding="utf-8")
    spans = [json.loads(line) for line in text.splitlines()]
    names = ("trajectory", "turn", "tool", "reward")
    return Counter(
        (span["name"], span["attributes"]["step"]) for span in spans if span["name"] in names
    )
