import errno
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.trainer.demo import DEMO
from treadle.trainer.launch.process import child_python_path
from treadle.trainer.main import main
from treadle.trainer.rollout.workers.pool import NoWorkerLeftError
from treadle.trainer.rollout.workers.router import RouterLostError

_HEAVY = ("torch", "ray", "megatron", "pyarrow", "matplotlib", "grpc")


def _run_alone(arguments: list[str], *, without: tuple[str, ...], home: Path) -> str:
    """Runs the command in its own process, which must succeed without these modules."""
    program = (
        "import sys\n"
        "from treadle.trainer.main import main\n"
        f"status = main({arguments!r})\n"
        f"heavy = sorted(set(sys.modules) & set({without!r}))\n"
        "sys.exit(f'loaded {heavy}' if heavy else status)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": child_python_path(), "HOME": str(home), "HF_HUB_OFFLINE": "1"},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    return result.stdout


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_asking_is_quick_and_loads_nothing_heavy(flag: str, tmp_path: Path) -> None:
    def used_s() -> float:
        """Of CPU: the wall clock also measures the machine's other work."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        _run_alone([flag], without=(*_HEAVY, "transformers"), home=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert used_s() < 2 or used_s() < 2  # the first may compile every module


def test_a_dry_run_loads_no_torch_and_leaves_nothing_behind(tmp_path: Path) -> None:
    shutil.copytree(DEMO.parent, tmp_path / "mine")
    reward = tmp_path / "mine" / "reward.py"
    reward.write_text("def score(trajectory):\n    return 1.0\n", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    arguments = ["--dry-run", "--config", "mine/config.yaml", "reward.name=mine/reward.py:score"]
    plan = _run_alone(arguments, without=_HEAVY, home=tmp_path)
    assert "mine/reward.py:score, for all rows" in plan
    assert sorted(tmp_path.rglob("*")) == before


def test_the_plan_of_the_demo_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "rollout.num_replicas=3"]) == 0
    assert "3 x torch" in capsys.readouterr().out


def test_the_configuration_is_printed_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "run.seed=7"]) == 0
    out = capsys.readouterr().out
    assert "# run.seed=7" in out
    assert "demo/calculator/config.yaml" in out


def _row(**columns: object) -> dict[str, object]:
    return {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        **columns,
    }


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"agent_name": "tool_agnt"},
            "line 1: agent loop 'tool_agnt' is not registered; registered",
        ),
        (
            {"agent_name": "no.such:Loop"},
            "line 1: cannot load the agent loop from no.such: no such module",
        ),
        (
            {"extra_info": {"tool_selection": ["x"]}},
            "which are not configured; configured tools: [",
        ),
        ({"images": ["a.png"]}, "line 1: the column 'images' holds 1 of them"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_rows_that_ask_for_what_is_not_there_end_the_run_before_anything_starts(
    columns: dict[str, object],
    message: str,
    dry: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(_row(**columns)) + "\n", encoding="utf-8")
    arguments = [f"data.train_files={rows}", f"run.dir={tmp_path / 'run'}"]
    assert main([*(["--dry-run"] if dry else []), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.temprature=1"], "unknown key rollout.temprature; did you mean"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
        (["--dry-run", "data.train_files=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        (["--dry-run", "data.prompts_per_step=5000"], "exceeds the"),
        (
            ["--dry-run", "algorithm.adv_estimator=foo"],
            "algorithm.advantage was given as algorithm.adv_estimator=foo",
        ),
        (
            [f"actor_rollout_ref.model.custom_chat_template={'{{x}}' * 1000}"],
            f"custom_chat_template={'{{x}}' * 16} is not available: the chat template is that of",
        ),
    ],
)
def test_bad_arguments_give_one_message_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_row_without_a_column_is_found_by_the_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.jsonl"
    row = _row()
    del row["prompt"]
    path.write_text(f"{json.dumps(_row())}\n{json.dumps(row)}\n")
    assert main(["--dry-run", f"data.train_files={path}"]) == 2
    assert "train.jsonl, line 2: the column 'prompt' is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 2, "run: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(0), 1, "ended by exit(0): raise an error there instead"),
        (NoWorkerLeftError("no loop worker is left"), 1, "error: no loop worker is left"),
        (RouterLostError("after 8 restarts"), 1, "error: after 8 restarts"),
    ],
)
def test_what_ends_a_run_from_outside_is_one_line(
    error: BaseException,
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def read(_: object, **limits: object) -> None:
        raise error

    monkeypatch.setattr("treadle.trainer.preflight.table.read_rows", read)
    assert main([f"run.dir={tmp_path / 'run'}"]) == status
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
