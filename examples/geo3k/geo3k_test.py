import io
import json
from pathlib import Path

import pyarrow
import pytest
from PIL import Image, ImageDraw
from pyarrow import parquet

from geo3k.preprocess import main as preprocess
from treadle.tools import load_catalogue
from treadle.tools.geometry3k import Geometry3kTool
from treadle.trainer.config.load import load_config
from treadle.trainer.data import read_rows
from treadle.trainer.main import main
from visual_questions.make_model import make_model

HERE = Path(__file__).parent
NUM_EXAMPLES = 10


def _drawing(index: int) -> bytes:
    image = Image.new("RGB", (200 + 20 * index, 160), (255, 255, 255))
    ImageDraw.Draw(image).polygon([(20, 140), (100 + index, 20), (180, 140)], outline=(0, 0, 0))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Ten examples of the published schema in each split, as the rows of `preprocess.py`."""
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    examples = [
        {
            "images": [{"bytes": _drawing(index), "path": None}],
            "problem": "<image>Find x.",
            "answer": str(index),
        }
        for index in range(NUM_EXAMPLES)
    ]
    for split in ("train", "validation", "test"):
        table = pyarrow.Table.from_pylist(examples)
        parquet.write_table(table, hub / f"{split}-00000-of-00001.parquet")
    out = tmp_path / "data"
    assert preprocess(["--from", str(tmp_path / "hub"), "--output", str(out)]) == 0
    return out


def test_the_rows_are_verls_with_their_drawings(data: Path) -> None:
    rows = read_rows([data / "train.parquet", data / "test.parquet"])
    assert len(rows) == 2 * NUM_EXAMPLES
    assert {row.columns["data_source"] for row in rows} == {"hiyouga/geometry3k"}
    assert rows[3].columns["images"] == [{"bytes": _drawing(3), "path": None}]


def test_a_tiny_model_looks_at_the_drawings(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_model(model, steps=0)
    arguments = ["--data", str(data / "test.parquet"), "--out", str(out), "reward.name=geometry3k"]
    sizes = ["rollout.prompt_length=640", "rollout.response_length=8"]
    assert main(["eval", str(model), *arguments, *sizes]) == 0, capsys.readouterr().err
    assert json.loads((out / "results.json").read_text())["scores"][-1]["failed"] == 0
    kept = {path.read_bytes() for path in (out / "trajectories" / "images").iterdir()}
    assert kept == {_drawing(index) for index in range(NUM_EXAMPLES)}


def test_the_configuration_has_the_numbers_of_verls_script() -> None:
    config = load_config([HERE / "config.yaml"], []).config
    assert config.data.train_files == (HERE / "data" / "train.parquet",)
    assert (config.data.prompts_per_step, config.rollout.samples_per_prompt) == (512, 5)
    assert (config.rollout.prompt_length, config.rollout.response_length) == (1024, 2048)
    assert (config.algorithm.kl_coef, config.algorithm.mini_batches) == (0.01, 4)
    assert (config.rollout.name, config.rollout.tensor_model_parallel_size) == ("sglang", 2)
    assert config.policy.optimizer.lr == 1e-6
    assert load_config([HERE / "tiny.yaml"], []).config.model.path == HERE / "model"


def test_the_catalogue_has_verls_tool() -> None:
    (tool,) = load_catalogue(HERE / "tools.yaml").values()
    assert tool.spec == Geometry3kTool().spec


def test_the_tiny_configuration_runs_to_its_end(data: Path, tmp_path: Path) -> None:
    """With a reward that differs, since no answer of this model is right."""
    model, run = tmp_path / "model", tmp_path / "run"
    make_model(model, steps=0)
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth):\n"
        "    return {'score': len(solution_str) % 7 / 7}\n"
    )
    settings = [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'test.parquet'}",
        f"model.path={model}",
        f"reward.name={reward}:score",
        f"run.dir={run}",
        "rollout.threads=1",
        "launch.policy_threads=1",
    ]
    assert main(["--config", str(HERE / "tiny.yaml"), *settings]) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert "val/reward" in steps[2]
    for step in steps[1:]:
        assert step["rollout/logprob_diff_max"] < 1e-3
