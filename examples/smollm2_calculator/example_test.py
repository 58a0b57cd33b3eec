"""The example to its end, with a model of one million parameters in SmolLM2's place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from smollm2_calculator.preprocess import Problem, main, simple_problem

from treadle.trainer.config.load import load_config, load_sft_config
from treadle.trainer.demo import DEMO
from treadle.trainer.main import main as treadle

HERE = Path(__file__).parent
SIMPLE = {
    "question": "Ann has 6 pens and buys 2 boxes of 7. How many pens has she?",
    "answer": "The boxes hold 2*7=<<2*7=14>>14.\nShe has 6+14=<<6+14=20>>20.\n#### 20",
}


def _rows(path: Path, count: int) -> Path:
    rows = []
    for i in range(count):
        question = f"Ann has {i} pens and buys {i + 2} boxes of 7. How many pens has she?"
        boxes, total = 7 * (i + 2), 7 * (i + 2) + i
        answer = f"<<{i + 2}*7={boxes}>>{boxes}\n<<{i}+{boxes}={total}>>{total}\n#### {total}"
        rows.append(json.dumps({"question": question, "answer": answer}) + "\n")
    path.write_text("".join(rows))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's data and model, of 40 and 8 made-up problems."""
    folder = tmp_path_factory.mktemp("smollm2")
    train, test = _rows(folder / "a.jsonl", 40), _rows(folder / "b.jsonl", 8)
    arguments = ["--train", str(train), "--test", str(test), "--model", str(DEMO.parent / "model")]
    assert main([*arguments, "--output", str(folder / "data")]) == 0
    return folder


def _metrics(run: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_two_calculations_become_one_expression() -> None:
    assert simple_problem(SIMPLE) == Problem(
        question=SIMPLE["question"], expression="6+(2*7)", answer="20"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("<<2*7=14>>", ""),  # the second uses a value that nothing computed
        ("<<2*7=14>>", "<<2*7=15>>"),
        ("<<2*7=14>>", "<<2*7=14>><<1*1=1>>"),
        ("#### 20", "#### 21"),
        ("<<6+14=20>>", "<<14+14=28>>"),
        ("6+14", "6.0+14"),
        ("6+14", "6+14+x"),
    ],
)
def test_what_is_not_simple_is_left_out(old: str, new: str) -> None:
    changed = simple_problem({**SIMPLE, "answer": SIMPLE["answer"].replace(old, new)})
    if new:
        assert changed is None
    else:
        assert changed is not None
        assert changed.expression == "6+14"  # what is written is what is believed


def test_a_long_question_or_a_large_number_is_left_out() -> None:
    assert simple_problem({**SIMPLE, "question": "pens " * 46}) is None
    large = {"question": "How many?", "answer": "<<500*2=1000>>\n#### 1000"}
    assert simple_problem(large) is None


def test_no_question_is_in_two_files(folder: Path) -> None:
    asked = []
    for name, key in (("sft_train", "messages"), ("train", "prompt"), ("val", "prompt")):
        lines = (folder / "data" / f"{name}.jsonl").read_text().splitlines()
        asked.append([json.loads(line)[key][1]["content"] for line in lines])
    assert [len(questions) for questions in asked] == [20, 20, 8]
    assert not set(asked[0]) & set(asked[1])


def test_the_configurations_name_the_files_that_the_script_writes(folder: Path) -> None:
    sft = load_sft_config([HERE / "sft.yaml"], []).config
    grpo = load_config([HERE / "grpo.yaml"], []).config
    files = (*sft.data.train_files, *sft.data.val_files)
    for path in (*files, *grpo.data.train_files, *grpo.data.val_files):
        assert (folder / path.relative_to(HERE)).exists()
    # As long as there is no such folder, the name could be one of the Hub.
    for model in (sft.model.path, grpo.model.path):
        assert (folder / "data" / "model").exists() and str(model).endswith("data/model")
    assert grpo.agent.parser == sft.agent.parser == "hermes"


def test_both_configurations_run_to_their_end(folder: Path) -> None:
    data = folder / "data"
    # What the small model and a test want otherwise: its lengths, float32, the engine, two steps.
    both = ["policy.dtype=float32", "schedule.val_every=2", "launch.policy_threads=1"]
    tuned = folder / "tuned"
    assert not treadle(
        [
            *("sft", f"--config={HERE / 'sft.yaml'}", *both, "schedule.total_steps=2"),
            *(f"data.train_files={data / 'sft_train.jsonl'}", f"model.path={data / 'model'}"),
            *(f"data.val_files={data / 'sft_val.jsonl'}", f"run.dir={tuned}"),
        ]
    )
    run = folder / "run"
    assert not treadle(
        [
            *(f"--config={HERE / 'grpo.yaml'}", *both, "schedule.total_steps=2"),
            *(
                "rollout.name=torch",
                "rollout.kv_cache_bytes=null",
                "rollout.threads=1",
                "rollout.dtype=float32",
            ),
            *(f"data.train_files={data / 'train.jsonl'}", f"data.val_files={data / 'val.jsonl'}"),
            *("data.prompts_per_step=2", "rollout.samples_per_prompt=2"),
            *("rollout.prompt_length=256", f"model.path={tuned}", f"run.dir={run}"),
        ]
    )
    assert [line["step"] for line in _metrics(run)] == [0, 1, 2]
    assert {line["rollout/num_failed"] for line in _metrics(run)[1:]} == {0}
