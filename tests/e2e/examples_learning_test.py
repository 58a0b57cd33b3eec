"""Each example runs to its end at a tiny size: its own configuration, real processes, few steps."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from draw_curve import draw as draw_curve
from hotpotqa_search.tiny_questions import conversation, draw, published

from treadle.trainer.launch.process import child_python_path
from treadle.trainer.report.metrics import Record, read_metrics

pytestmark = pytest.mark.timeout(600)
EXAMPLES = Path(__file__).parents[2] / "examples"
_FEW = (
    *("schedule.total_steps=2", "schedule.val_every=2", "schedule.save_every=null"),
    *("schedule.val_before_train=false", "data.max_val_rows=4"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4"),
    *("rollout.threads=1", "launch.policy_threads=1"),
)


def _python(*arguments: str) -> str:
    done = subprocess.run(
        (sys.executable, *arguments),
        env={**os.environ, "PYTHONPATH": child_python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def _train(run_dir: Path, files: Sequence[str], *settings: str) -> tuple[Record, ...]:
    """Trains with files of the examples; returns the lines of metrics.jsonl."""
    configs = [f"--config={EXAMPLES / file}" for file in files]
    given = (*configs, *_FEW, *settings, f"run.dir={run_dir}")
    _python("-m", "treadle.trainer.main", *given)
    records = read_metrics(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["rollout/num_failed"] == 0 for record in records)
    # Without differing rewards, as where the demo's model cannot read, nothing is trained.
    assert all(record.get("rollout/logprob_diff_max", 0.0) < 1e-3 for record in records)
    assert (run_dir / "report.html").stat().st_size > 0
    return records


def test_a_task_in_one_file(tmp_path: Path) -> None:
    records = _train(tmp_path / "run", ["one_file/shop.yaml"], "schedule.val_every=null")
    assert all(record["reward/calls"] > 0 for record in records)


def _of_the_hub(folder: Path, row: Mapping[str, object], count: int) -> Path:
    """Writes questions in the form and under the names that the Hub has them."""
    (folder / "main").mkdir(parents=True)
    for split in ("train", "test"):
        table = pa.Table.from_pylist([dict(row)] * count)
        pq.write_table(table, folder / "main" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    row = {"question": "Ann has 7 pens and buys 5. How many?", "answer": "7 + 5 = 12\n#### 12"}
    return _of_the_hub(tmp_path_factory.mktemp("gsm8k"), row, 8)


def test_gsm8k_with_the_tool_from_the_hubs_files(gsm8k: Path, tmp_path: Path) -> None:
    script = EXAMPLES / "gsm8k_tool_agent" / "preprocess.py"
    _python(str(script), "--from", str(gsm8k), "--output", str(tmp_path / "data"))
    records = _train(
        tmp_path / "run",
        ["gsm8k_tool_agent/tiny.yaml"],
        f"data.train_files={tmp_path}/data/train.parquet",
        f"data.val_files={tmp_path}/data/test.parquet",
    )
    assert all("tool/call_rate" in record for record in records)


def test_gsm8k_in_a_single_turn_from_the_hubs_files(gsm8k: Path, tmp_path: Path) -> None:
    arguments = ("--local_dataset_path", str(gsm8k), "--local_dir", str(tmp_path / "data"))
    _python(str(EXAMPLES / "from_verl/examples/data_preprocess/gsm8k.py"), *arguments)
    records = _train(
        tmp_path / "run",
        ["gsm8k_tool_agent/tiny.yaml", "gsm8k_tool_agent/single_turn.yaml"],
        f"data.train_files={tmp_path}/data/train.parquet",
        f"data.val_files={tmp_path}/data/test.parquet",
    )
    assert all(record["tokens/observed"] == 0 for record in records)


def test_hotpotqa_with_search_from_the_authors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    questions = [draw(rng, start=100 + i, person=200 + i, asks_town=i % 2 == 0) for i in range(9)]
    records = [published(question, questions[:2]) for question in questions]
    (tmp_path / "hotpot.json").write_text(json.dumps(records))
    data = tmp_path / "examples" / "hotpotqa_search" / "data" / "tiny"
    script = EXAMPLES / "hotpotqa_search" / "preprocess.py"
    source = ("--source", str(tmp_path / "hotpot.json"), "--test", "1")
    _python(str(script), *source, "--output", str(data))
    rows = [conversation(question, searches=2) for question in questions]
    (tmp_path / "sft.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    _python(
        *("-m", "treadle.trainer.main", "sft"),
        f"--config={EXAMPLES / 'hotpotqa_search' / 'tiny_sft.yaml'}",
        *(f"data.{split}_files={tmp_path}/sft.jsonl" for split in ("train", "val")),
        *("data.batch_size=4", "schedule.total_steps=2", "launch.policy_threads=1"),
        f"run.dir={tmp_path}/tuned",
    )
    monkeypatch.chdir(tmp_path)  # the catalogue names the corpus from the repository's root
    _train(
        tmp_path / "run",
        ["hotpotqa_search/tiny.yaml"],
        f"model.path={tmp_path}/tuned",
        f"data.train_files={data}/train.jsonl",
        f"data.val_files={data}/test.jsonl",
    )


@pytest.mark.parametrize("example", ["multi_trajectory", "train_existing_agent"])
def test_an_agent_on_the_expressions(example: str, tmp_path: Path) -> None:
    """The third, math_expression, learns in langgraph_learning_test."""
    records = _train(tmp_path / "run", [f"{example}/config.yaml"])
    assert all(record["tool/call_rate"] > 0 for record in records)
    draw_curve(records, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0
    if example == "multi_trajectory":  # its model has never seen notes, and rarely succeeds yet
        assert any(record["rollout/samples"] > 1 for record in records)
    else:
        assert any(record["reward/mean"] > 0 for record in records)


def test_an_environment_that_makes_its_own_rows(tmp_path: Path) -> None:
    records = _train(tmp_path / "run", ["environments/tiny.yaml"], "schedule.val_every=null")
    assert all(record["environment/finished"] >= 0 for record in records)


def test_questions_about_drawings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    data, model = tmp_path / "data", tmp_path / "model"
    sizes = ("--train", "8", "--test", "4")
    _python("-m", "visual_questions.preprocess", "--output", str(data), *sizes)
    _python("-m", "visual_questions.make_model", "--out", str(model), "--steps", "2")
    _train(
        tmp_path / "run",
        ["visual_questions/tiny.yaml"],
        f"model.path={model}",
        f"data.train_files={data}/train.parquet",
        f"data.val_files={data}/test.parquet",
    )
