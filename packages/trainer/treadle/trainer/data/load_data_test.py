import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from treadle.agent_loop import SetupError
from treadle.trainer.config.load import load_config
from treadle.trainer.data import DataError
from treadle.trainer.data.load_data import Inputs
from treadle.trainer.demo import DEMO
from treadle.trainer.preflight import check_run

_TRAINING_ONLY = ("data.val_files=[]", "schedule.val_every=null", "data.prompts_per_step=8")


def _prepare(*overrides: str, base: Sequence[str] = _TRAINING_ONLY) -> Inputs:
    """Returns the inputs of the demo."""
    config = load_config([DEMO], [*base, *overrides]).config
    return check_run(config, Path("/nowhere")).inputs


def _rows(path: Path, **changes: object) -> str:
    """The demo's first rows with these columns; None takes one away."""
    lines = (DEMO.parent / "train.jsonl").read_text(encoding="utf-8").splitlines()[:8]
    with path.open("w", encoding="utf-8") as file:
        for line in lines:
            row = json.loads(line) | changes
            file.write(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n")
    return f"data.train_files={path}"


def test_the_demo_is_ready_to_run() -> None:
    inputs = _prepare("data.max_val_rows=5", base=())
    assert len(inputs.val) == 5
    assert list(inputs.rules.tools) == ["calculator"]
    assert {prompt.loop for prompt in inputs.train} == {"tool_agent"}
    assert inputs.notes == ()


def test_tools_that_no_row_would_reach_are_refused(tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.jsonl", agent_name=None)
    with pytest.raises(DataError, match=r"no agent_name .*rows.jsonl, line 1"):
        _prepare(rows)
    assert _prepare(rows, "agent.default_loop=tool_agent").train[0].loop == "tool_agent"


def test_prompts_that_are_too_long_are_refused_or_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="longer than 20 tokens"):
        _prepare("rollout.prompt_length=20")
    with pytest.raises(DataError, match="no train row is left"):
        _prepare("rollout.prompt_length=20", "data.overlong_prompts=drop")


def test_trajectories_that_may_outgrow_the_model_are_refused() -> None:
    with pytest.raises(SetupError, match=r"response_length=100000 are 100256 tokens, and the mod"):
        _prepare("rollout.response_length=100000")


def test_a_reward_that_is_not_there_is_refused() -> None:
    with pytest.raises(SetupError, match="gsm9k"):
        _prepare("reward.name=gsm9k")


def test_rows_that_nothing_can_score_are_refused(tmp_path: Path) -> None:
    rows = _rows(tmp_path / "rows.jsonl", data_source="mine")
    with pytest.raises(SetupError, match="no reward is known for data_source 'mine'"):
        _prepare(rows)
    assert _prepare(rows, "reward.name=gsm8k").train


_SCORES = """
class Scores:
    scores_itself = True

    async def run(self, task, services): ...
"""


def test_rows_whose_loop_scores_need_no_reward_and_take_none(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(_SCORES)
    given = [
        _rows(tmp_path / "rows.jsonl", data_source="mine", reward_model={}, agent_name="scores"),
        f"agent.loops.scores={code}:Scores",
        "agent.tool_catalogue=null",
    ]
    inputs = _prepare(*given)
    assert inputs.loops == {"scores"}
    with pytest.raises(SetupError, match=r"reward.name=gsm8k would score nothing.*scores_itself"):
        _prepare(*given, "reward.name=gsm8k")


def test_the_reward_is_for_the_rows_that_no_loop_scores(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(_SCORES)
    scored = tmp_path / "scored.jsonl"
    others = tmp_path / "others.jsonl"
    _rows(scored, data_source="mine", agent_name=f"{code}:Scores")
    _rows(others, data_source="theirs")
    given = [f"data.train_files=[{scored}, {others}]"]
    with pytest.raises(SetupError, match=r"no reward is known for data_source 'theirs'"):
        _prepare(*given)
    assert _prepare(*given, "reward.name=gsm8k").loops == {f"{code}:Scores", "tool_agent"}


def test_an_environment_is_a_data_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Greets:\n    def reset(self, *, seed=None):\n        return f'hello {seed}', {}\n"
    )
    settings = tmp_path / "greets.yaml"
    settings.write_text("gymnasium: mine.py:Greets\nrows: 9\n")
    given = [f"data.train_files={settings}", "agent.tool_catalogue=null"]
    inputs = _prepare(*given)
    assert len(inputs.train) == 9
    assert inputs.loops == {"treadle.tools.environments.gymnasium:GymnasiumLoop"}
    by_name = f"data.train_files=gymnasium:{tmp_path}/mine.py:Greets"
    assert len(_prepare(by_name, "agent.tool_catalogue=null").train) == 256
    with pytest.raises(DataError, match="makes its rows at start, and data"):
        _prepare(*given, "data.streaming=true")
    settings.write_text("gymnasium: mine.py:Nobody\n")
    with pytest.raises(DataError, match="has no 'Nobody'"):
        _prepare(*given)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SetupError, match=r"holds no tokenizer\.json"):
        _prepare(f"model.path={tmp_path}")


def test_a_reward_that_is_code_for_verl_is_refused_with_the_built_in_ones(tmp_path: Path) -> None:
    file = tmp_path / "retool.py"
    file.write_text(
        "import verl.a_part_that_is_not_here\n"
        "def compute_score(data_source, solution_str, ground_truth):\n"
        "    return 0.0\n"
    )
    with pytest.raises(SetupError, match=r"No module named 'verl.*reward\.name=retool is that of"):
        _prepare(f"reward.name={file}:compute_score")


def test_rewards_are_added_and_a_row_that_lacks_their_columns_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def near(trajectory, unit): return 0.0\n"
        "def best(trajectories, level=0): return [0.0 for _ in trajectories]\n" + _SCORES
    )
    own = (f"reward.name=[{file}:near, {file}:best]", "reward.weights.best=0.5")
    rows = _rows(tmp_path / "rows.jsonl", unit="km", data_source="mine")
    config = load_config([DEMO], [*_TRAINING_ONLY, rows, *own]).config
    plan = dict(check_run(config, Path("/nowhere")).plan.details)
    assert plan["reward"] == f"{file}:near + 0.5 x {file}:best, for all rows"
    with pytest.raises(DataError, match=r"train.jsonl, line 1: the reward .*near takes unit"):
        _prepare(*own)
    with pytest.raises(SetupError, match=r"best compares .* algorithm.advantage=remax"):
        _prepare(f"reward.name={file}:best", rows, "algorithm.advantage=remax")
    scored = _rows(tmp_path / "scored.jsonl", agent_name=f"{file}:Scores")
    files = f"data.train_files=[{tmp_path}/rows.jsonl, {tmp_path}/scored.jsonl]"
    with pytest.raises(SetupError, match=r"best compares .* some rows score theirs themselves"):
        _prepare(f"reward.name={file}:best", scored, files)
