import json
from pathlib import Path

import pytest
from hotpotqa_search.preprocess import main, read

from treadle.agent_loop import AgentTask, Message
from treadle.tools import load_catalogue
from treadle.trainer.config.load import load_config
from treadle.trainer.data import DataError

HERE = Path(__file__).parent
QUESTION = {"question": "Which hills?", "answer": "seven"}
HUB = {
    **QUESTION,
    "context": {"title": ["Rome", "Paris"], "sentences": [["It has hills.", " Seven."], ["No."]]},
}
AUTHORS = {**QUESTION, "context": [["Rome", ["It has hills.", " Seven."]], ["Oslo", ["Fjords."]]]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([HUB, AUTHORS, HUB]))
    return path


def test_both_spellings_give_each_paragraph_once(source: Path) -> None:
    records, corpus = read([source])
    assert len(records) == 3
    assert corpus == {"Rome": "It has hills. Seven.", "Paris": "No.", "Oslo": "Fjords."}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("{}", "not a list of questions"),
        ("[{}]", "question 0: KeyError"),
        ('[{"question": "a", "answer": 3, "context": []}]', "question 0: .*must be texts"),
        ('[{"question": "a", "answer": "b", "context": "c"}]', "question 0: .*context is 'c'"),
    ],
)
def test_what_is_not_hotpotqa_is_named(
    source: Path, text: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source.write_text(text)
    with pytest.raises(DataError, match=why):
        read([source])
    assert main(["--source", str(source), "--output", str(source.parent / "out")]) == 2
    assert "error:" in capsys.readouterr().err


def test_files_of_the_hub_give_the_same_questions(source: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    of_the_hub = source.parent / "train-00000-of-00001.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([HUB] * 3), of_the_hub)
    source.write_text(json.dumps([HUB] * 3))
    assert read([of_the_hub]) == read([source])
    assert read([of_the_hub, source], limit=4) == ([QUESTION] * 4, read([source])[1])


def test_where_the_hub_is_out_of_reach_the_command_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert main(["--output", str(tmp_path / "data")]) == 2
    assert "run `hf download hotpotqa/hotpot_qa --repo-type dataset" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_some_questions_are_left_on_either_side(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--source", str(source), "--output", str(source.parent), "--test", "3"]) == 2
    assert "--test is 3, of 3 questions" in capsys.readouterr().err


@pytest.mark.asyncio
async def test_the_rows_are_read_and_the_catalogue_searches_the_corpus(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.trainer.data import read_rows

    monkeypatch.chdir(source.parent)
    out = source.parent / "examples" / "hotpotqa_search" / "data"
    assert main(["--source", str(source), "--output", str(out), "--test", "1"]) == 0
    rows = read_rows([out / "train.jsonl", out / "test.jsonl"])
    assert [row.columns["agent_name"] for row in rows] == ["tool_agent"] * 3
    (tool,) = load_catalogue(HERE / "tools.yaml").values()
    question = Message(role="user", content="Which hills?")
    task = AgentTask(task_id="r", sample_index=0, rollout_index=0, loop="x", messages=(question,))
    session = await tool.open(task)
    found = await session.call({"query_list": ["seven hills"]})
    assert "It has hills. Seven." in found.content


@pytest.mark.parametrize("name", ["config.yaml", "tiny.yaml"])
def test_the_configurations_are_valid_and_name_files_of_the_example(name: str) -> None:
    config = load_config([HERE / name], []).config
    assert config.agent.tool_catalogue == HERE / "tools.yaml"
    assert config.reward.name == "hotpotqa"
