import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hotpotqa_search.preprocess import main, read
from hotpotqa_search.tiny_questions import TwoHops, conversation, data_files, draw, published

from treadle.agent_loop import AgentTask, Message
from treadle.agent_loop.hf import HfRenderer
from treadle.tools import load_catalogue
from treadle.tools.rewards.hotpotqa import score
from treadle.tools.search import SearchTool
from treadle.trainer.config.load import load_config, load_sft_config
from treadle.trainer.data import DataError
from treadle.trainer.demo import DEMO
from treadle.trainer.sft import transcribe
from treadle.trainer.sft.conversations import read_conversations

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


@pytest.mark.parametrize(
    ("name", "catalogue"), [("config.yaml", "tools.yaml"), ("tiny.yaml", "tools_tiny.yaml")]
)
def test_the_configurations_are_valid_and_name_files_of_the_example(
    name: str, catalogue: str
) -> None:
    config = load_config([HERE / name], []).config
    assert config.agent.tool_catalogue == HERE / catalogue
    assert config.reward.name == "hotpotqa"


SMALL = {"sft_train": 40, "sft_val": 4, "train": 12, "val": 6}


def _questions(count: int) -> list[TwoHops]:
    rng = random.Random(5)
    return [
        draw(rng, start=100 + 2 * index, person=101 + 2 * index, asks_town=index % 2 == 0)
        for index in range(count)
    ]


def _said(row: Mapping[str, Any]) -> str:
    text: str = row["messages"][-1]["content"]
    return text


def test_the_tiny_files_are_those_of_the_seed_and_share_nothing_with_the_held_out_questions() -> (
    None
):
    files: Any = data_files(seed=0, num_rows=SMALL)
    assert files == data_files(seed=0, num_rows=SMALL)
    assert {name: len(rows) for name, rows in files.items()} == {**SMALL, "corpus": 2 * 18}
    texts = {entry["title"].lower(): entry["text"] for entry in files["corpus"]}
    names: dict[str, set[str]] = {"train": set(), "val": set()}
    for split, used in names.items():
        for row in files[split]:
            start = next(title for title in texts if f"{title} " in row["prompt"][1]["content"])
            person = texts[start].split(" by ")[1].rstrip(".")
            assert row["reward_model"]["ground_truth"] in texts[person]
            used |= {start, person}
    assert not names["train"] & names["val"]


def test_tiny_questions_are_published_as_hotpotqa_is(tmp_path: Path) -> None:
    questions = _questions(6)
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([published(question, questions[:2]) for question in questions[:2]]))
    records, corpus = read([path])
    assert records == [{"question": q.question, "answer": q.answer} for q in questions[:2]]
    assert corpus == dict(document for q in questions[:2] for document in q.documents)


def test_one_search_does_not_answer_and_no_guess_is_right() -> None:
    for question in _questions(40):
        rewards = [
            score(_said(conversation(question, searches=n)), [question.answer]) for n in (0, 1, 2)
        ]
        assert rewards == [0.0, 0.0, 1.0]
        first = question.documents[0]
        assert question.answer not in " ".join(first)


@pytest.mark.asyncio
async def test_the_index_finds_what_the_conversations_show(tmp_path: Path) -> None:
    questions = _questions(120)  # towns and schools have many of their numbers
    corpus = tmp_path / "corpus.jsonl"
    documents = [document for question in questions for document in question.documents]
    lines = [json.dumps({"title": title, "text": text}) for title, text in documents]
    corpus.write_text("\n".join(lines))
    tool = SearchTool(config={"corpus_path": str(corpus), "topk": 1})
    for question in questions:
        messages: Any = conversation(question, searches=2)["messages"]
        for asked, answered in zip(messages[2:-1:2], messages[3:-1:2], strict=True):
            (call,) = asked["tool_calls"]
            found = await tool.call(call["function"]["arguments"])
            assert found.content == answered["content"]


def test_the_conversations_are_read_and_fit_into_the_limits_of_both_halves(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    rows = data_files(seed=0, num_rows=SMALL)["sft_train"]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    halves = load_sft_config([HERE / "tiny_sft.yaml"], []).config
    limits = load_config([HERE / "tiny.yaml"], []).config.rollout
    renderer = HfRenderer.from_directory(DEMO.parent / "model")
    read = read_conversations([path], halves.data, split="train").conversations
    for each in read:
        (ledger,) = transcribe(renderer, each.demonstration)
        assert ledger.spans[1].start <= limits.prompt_length
        assert len(ledger.ids) - ledger.spans[1].start <= limits.response_length
        assert len(ledger.ids) <= halves.data.max_length
    assert {len(each.demonstration.messages) for each in read} >= {3, 5, 7}
