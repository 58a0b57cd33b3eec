"""A run whose policy rank is killed resumes by itself, with the curve of an undisturbed one."""

import json
import os
import re
import signal

import pytest

from .testing import StartTrainer

pytestmark = pytest.mark.timeout(1200)


def test_a_lost_rank_resumes_the_run_until_it_gets_nowhere(start_trainer: StartTrainer) -> None:
    arguments = (
        "schedule.val_every=null",
        "schedule.val_before_train=false",
        "schedule.save_every=2",
        "launch.max_failures=1",
    )
    lossy = start_trainer(*arguments, "schedule.total_steps=1000", name="lossy")
    lossy.read_until(" 3/1000")
    os.kill(lossy.pid_of("policy-0"), signal.SIGKILL)
    resumed = lossy.read_until(
        "the run resumed by itself, after policy rank 0 was ended by SIGKILL"
    )
    (step,) = map(int, re.findall(r"step (\d+):", resumed))
    lossy.read_until(f" {step + 1}/1000")  # the step before the next checkpoint
    # Not in step + 2: its checkpoint would set the count back.
    rank = lossy.pid_of("policy-0")
    os.kill(rank, signal.SIGKILL)
    said = lossy.wait()
    notes = [json.loads(x) for x in (lossy.run_dir / "notes.jsonl").read_text().splitlines()]
    assert [note["step"] for note in notes if "resumed by itself" in note["note"]] == [step]
    lines = {line["step"]: line for line in lossy.metrics()}
    assert lines[step + 1]["run/resumes"] == 1
    assert said == 1
    assert "resumed once without a new checkpoint (launch.max_failures=1)" in lossy.output
    assert "policy rank 0 was ended by SIGKILL" in lossy.page()

    whole = start_trainer(*arguments, f"schedule.total_steps={step + 1}", name="whole")
    assert whole.wait() == 0, whole.output
    assert lossy.curve()[: step + 1] == whole.curve()
