"""The example to its end at tiny scale, and the configurations for GPUs as far as they are read."""

import asyncio
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from retool.false_convergence import MODES, arguments_of, draw
from retool.tiny_tasks import KINDS, data_files, hard_product, published_conversation

from treadle.tools.code_interpreter import print_last_expression
from treadle.tools.sandbox.execution import Program
from treadle.tools.sandbox.restricted import RestrictedSandbox
from treadle.trainer.config.load import load_config, load_sft_config
from treadle.trainer.main import main as treadle

HERE = Path(__file__).parent
SMALL = {"sft_train": 12, "sft_val": 6, "train": 12, "val": 6, "hard": 12}


def _metrics(run: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retool")
    for name, rows in data_files(seed=0, num_rows=SMALL).items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_each_program_prints_the_answer_in_the_sandbox_of_the_tiny_run() -> None:
    rng = random.Random(3)
    tasks = [kind(rng) for kind in (*KINDS, hard_product) for _ in range(5)]

    async def outputs() -> list[str]:
        async with RestrictedSandbox(processes=1) as sandbox:
            programs = (
                Program(
                    code=print_last_expression(task.code),
                    timeout_s=10,
                    language="python",
                    memory_limit_mib=128,
                )
                for task in tasks
            )
            return [(await sandbox.run(program)).stdout for program in programs]

    assert asyncio.run(outputs()) == [f"{task.answer}\n" for task in tasks]
    assert all(task.guess in task.question for task in tasks)


def test_a_conversation_is_published_as_retool_sft_is() -> None:
    task = hard_product(random.Random(0))
    messages: Any = published_conversation(task, runs=2)["messages"]
    asked, said = messages
    assert "*user question:*" in asked["content"]
    assert said["content"].count(f"```python\n{task.code}\n```") == 2
    assert said["content"].endswith(f"<answer>\\boxed{{{task.answer}}}</answer>")


def test_the_files_are_those_of_the_seed_and_share_no_question(data: Path) -> None:
    files = data_files(seed=0, num_rows=SMALL)
    assert files == data_files(seed=0, num_rows=SMALL)
    asked = [
        {(row.get("messages") or row["prompt"])[0]["content"] for row in rows}  # type: ignore[index]
        for rows in files.values()
    ]
    assert [len(questions) for questions in asked] == [SMALL[name] for name in files]
    assert not any(a & b for a, b in itertools.combinations(asked, 2))
    more = data_files(seed=0, num_rows={**SMALL, "sft_train": 20})
    assert more["val"] == files["val"]


def test_the_reinforced_prompt_is_the_imitated_one() -> None:
    # Both are converted from what is published, by two functions.
    files = data_files(seed=0, num_rows={"sft_train": 1, "train": 1})
    endings = {
        (row.get("messages") or row["prompt"])[0]["content"].partition("\n")[2]  # type: ignore[index]
        for rows in files.values()
        for row in rows
    }
    assert len(endings) == 1


def test_the_configurations_for_gpus_are_valid() -> None:
    config = load_config([HERE / "config.yaml"], []).config
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.loss_aggregation == "token-mean"
    assert config.data.val_files == (HERE / "data" / "aime" / "aime_2024.parquet",)
    assert config.reward.mode in MODES
    assert load_sft_config([HERE / "sft.yaml"], []).config.data.max_length == 16384


def test_both_halves_run_to_their_end(data: Path) -> None:
    tuned = data / "tuned"
    assert not treadle(
        [
            *("sft", f"--config={HERE / 'tiny_sft.yaml'}", "schedule.total_steps=2"),
            *(f"data.train_files={data / 'sft_train.jsonl'}", "data.batch_size=4"),
            *(f"data.val_files={data / 'sft_val.jsonl'}", f"run.dir={tuned}"),
            "launch.policy_threads=1",
        ]
    )
    run, aime = data / "run", data / "aime"
    published = [{"ID": f"2024-I-{n}", "Problem": "How many?", "Answer": 25} for n in (1, 2)]
    pq.write_table(pa.Table.from_pylist(published), data / "aime_2024_problems.parquet")
    assert not treadle(["data", "aime", f"--from={data}", f"--output={aime}"])
    assert not treadle(
        [
            *(f"--config={HERE / 'tiny.yaml'}", "schedule.total_steps=2", f"model.path={tuned}"),
            f"data.train_files={data / 'train.jsonl'}",
            f"data.val_files=[{data / 'val.jsonl'},{aime / 'aime_2024.parquet'}]",
            *("data.prompts_per_step=2", "rollout.samples_per_prompt=2", "schedule.val_every=2"),
            *("rollout.response_length=96", "algorithm.max_generation_batches=1"),
            *("rollout.threads=1", "launch.policy_threads=1", f"run.dir={run}"),
        ]
    )
    lines = _metrics(run)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {line["rollout/num_failed"] for line in lines[1:]} == {0}
    assert all("reward/wrong_with_many_turns" in line for line in lines[1:])
    # The sources of the held-out rows apart: the configuration for GPUs has AIME alone.
    for source in ("aime_2024", "math_dapo"):
        assert all(f"val/accuracy/{source}" in lines[step] for step in (0, 2))


def test_the_picture_is_drawn_of_runs_that_differ_in_the_mode_alone(tmp_path: Path) -> None:
    given = [
        arguments_of(mode, model=tmp_path, data=tmp_path, run=tmp_path / "run", steps=2)
        for mode in MODES
    ]
    different = {line for one in given for line in one} - set(given[0]).intersection(*given)
    assert different == {f"reward.mode={mode}" for mode in MODES}
    step = {"reward/mean": -1.0, "reward/accuracy": 0.0, "reward/wrong_with_many_turns": 0.0}
    draw({mode: [{**step, "step": n} for n in (1, 2)] for mode in MODES}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
