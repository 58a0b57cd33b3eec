"""`treadle sft` end to end: it trains, resumes bit for bit, and is the start of reinforcement.

One whole run is shared, with which the others are compared.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from sft.make_conversations import conversations

from treadle.trainer.demo import DEMO
from treadle.trainer.report.metrics import RANK_RATE

from .testing import SMALL

pytestmark = pytest.mark.timeout(900)
_STEPS = 8


_TREADLE = (sys.executable, "-m", "treadle.trainer.main")


def _treadle(*arguments: str) -> None:
    _run([*_TREADLE, *arguments])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def _lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _metrics(run: Path) -> list[dict[str, float]]:
    """What was learned, without times and resumes."""
    own = ("time/", "run/", RANK_RATE)
    return [{k: v for k, v in line.items() if not k.startswith(own)} for line in _lines(run)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    for name, count in (("train", 64), ("val", 16)):
        text = "".join(f"{json.dumps(row)}\n" for row in conversations(name, count))
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def _command(folder: Path, name: str, **keys: object) -> list[str]:
    settings: Mapping[str, object] = {
        "data.train_files": folder / "train.jsonl",
        "data.val_files": folder / "val.jsonl",
        "data.batch_size": 8,
        "model.path": "demo:calculator",
        "policy.optimizer.lr": 3e-4,
        "schedule.val_every": 3,
        "schedule.save_every": 3,
        "schedule.total_steps": _STEPS,
        "run.dir": folder / name,
        **keys,
    }
    return [*_TREADLE, "sft", *(f"{key}={value}" for key, value in settings.items())]


def _sft(folder: Path, name: str, **keys: object) -> Path:
    _run(_command(folder, name, **keys))
    return folder / name


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return _sft(folder, "run")


def test_the_losses_fall(run: Path) -> None:
    lines = _metrics(run)
    assert [line["step"] for line in lines] == list(range(_STEPS + 1))
    validated = {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}
    assert list(validated) == [0, 3, 6, _STEPS]
    assert validated[_STEPS] < 0.5 * validated[0]
    losses = [line["train/loss"] for line in lines[1:]]
    assert sum(losses[-3:]) < sum(losses[:3])  # a batch of 8 alone says little
    assert (run / "report.html").stat().st_size > 0
    assert (run / "curves.png").stat().st_size > 0


def test_a_run_that_lost_its_rank_resumes_as_the_uninterrupted_one_bit_for_bit(
    run: Path, folder: Path
) -> None:
    lossy = folder / "lossy"
    command = _command(folder, "lossy", **{"launch.max_failures": 1})
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as trainer:
        assert trainer.stdout is not None
        said = ""
        for line in trainer.stdout:
            said += line
            if f" 4/{_STEPS}" in line and "resumed" not in said:
                ready = json.loads((lossy / "logs" / "policy-0.ready").read_text())
                os.kill(ready["pid"], signal.SIGKILL)
    assert trainer.returncode == 0, said
    notes = (lossy / "notes.jsonl").read_text()
    assert "the run resumed by itself, after policy rank 0 was ended by SIGKILL" in notes
    assert _lines(lossy)[-1]["run/resumes"] == 1
    assert _metrics(lossy) == _metrics(run)
    weights = f"checkpoints/step-{_STEPS:08d}/hf/model.safetensors"
    assert (lossy / weights).read_bytes() == (run / weights).read_bytes()


def test_a_run_begun_at_a_checkpoint_of_another_goes_on_as_that_one(
    run: Path, folder: Path
) -> None:
    begun = _sft(folder, "begun", **{"run.resume": run / "checkpoints" / "step-00000006"})
    assert _metrics(begun) == _metrics(run)[7:]


def test_two_ranks_learn_the_same(run: Path, folder: Path) -> None:
    keys = {"policy.parallel.data": 2, "schedule.total_steps": 2, "schedule.val_every": 2}
    two = _metrics(_sft(folder, "two", **keys))
    for one, both in zip(_metrics(run)[:3], two, strict=True):
        for name in one.keys() & {"train/loss", "train/grad_norm", "val/loss"}:
            assert both[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)


def test_reinforcement_starts_from_the_run_and_the_model_calls_the_tool(
    run: Path, folder: Path
) -> None:
    started = folder / "rl"
    _treadle(
        f"--config={DEMO}",
        *SMALL,
        f"model.path={run}",
        f"run.dir={started}",
        "schedule.total_steps=1",
    )
    before, step = _metrics(started)
    # Of the demo's model, which was trained to call it for some wordings only, about a half.
    assert before["val/tool_call_rate"] == 1.0
    assert step["actor/grad_norm"] >= 0
    assert step["rollout/logprob_diff_max"] < 1e-3


def test_the_run_can_be_exported(run: Path, folder: Path) -> None:
    _treadle("export", str(run), str(folder / "out"), "--step", "6")
    assert '"sft"' in (folder / "out" / "README.md").read_text()
    assert (folder / "out" / "model.safetensors").is_file()
