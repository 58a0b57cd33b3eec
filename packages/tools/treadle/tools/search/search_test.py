import json
from pathlib import Path

import httpx
import pytest

from treadle.agent_loop import AgentTask, Message, SetupError, ToolFailure
from treadle.tools.search import SearchTool
from treadle.tools.search.__main__ import app
from treadle.tools.search.bm25 import Bm25Index
from treadle.tools.search.passage import Passage, as_text
from treadle.tools.search.service import RetrievalService

CORPUS = [
    {"title": "Paris", "text": "Paris is the capital of France."},
    {"title": "Rome", "text": "Rome is the capital of Italy.\nIt has seven hills."},
    {"contents": "Bicycles\nA bicycle has two wheels."},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in CORPUS))
    return path


def a_task() -> AgentTask:
    question = Message(role="user", content="?")
    return AgentTask(task_id="r", sample_index=0, rollout_index=0, loop="x", messages=(question,))


@pytest.mark.asyncio
async def test_the_model_reads_what_verls_tool_writes(corpus: Path) -> None:
    tool = SearchTool(config={"corpus_path": str(corpus), "topk": 1})
    session = await tool.open(a_task())
    result = await session.call({"query_list": ["hills of Rome", "bicycle wheel"]})
    assert json.loads(result.content) == {
        "result": "Doc 1 (Title: Rome)\nRome is the capital of Italy.\nIt has seven hills.\n---\n"
        "Doc 1 (Title: Bicycles)\nA bicycle has two wheels."
    }
    assert {metric.name: metric.value for metric in result.metrics} == {
        "search/queries": 2,
        "search/results": 2,
    }
    await session.aclose()


@pytest.mark.asyncio
async def test_the_best_passage_comes_first_and_a_stranger_not_at_all(corpus: Path) -> None:
    index = Bm25Index.from_file(corpus)
    assert len(index) == 3
    capital, nothing, stopped = await index.retrieve(
        ["capital of Italy", "zebra", "the of"], topk=5
    )
    assert [passage.contents.partition("\n")[0] for passage in capital] == ["Rome", "Paris"]
    assert capital[0].score > capital[1].score > 0
    assert (nothing, stopped) == ([], [])
    assert as_text([nothing]) == '{"result": "No search results found."}'


@pytest.mark.parametrize(
    "queries",
    [None, [], "Rome", ["Rome", ""], ["Rome", 3], ["x"] * 33],
)
@pytest.mark.asyncio
async def test_what_the_model_asks_wrongly_it_is_told(corpus: Path, queries: object) -> None:
    tool = SearchTool(config={"corpus_path": str(corpus)})
    with pytest.raises(ToolFailure, match=r"quer"):
        await tool.call({"query_list": queries})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, "either retrieval_service_url"),
        ({"retrieval_service_url": "http://x", "corpus_path": "y"}, "either"),
        ({"retrieval_url": "http://x"}, "did you mean 'retrieval_service_url'"),
        ({"corpus_path": "absent.jsonl"}, r"cannot read the corpus absent\.jsonl"),
        ({"retrieval_service_url": "http://x", "topk": 0}, "topk must be an integer above 0"),
        ({"retrieval_service_url": "http://x", "topk": 2.5}, "topk must be an integer above 0"),
        ({"retrieval_service_url": "http://x", "default_timeout": "1"}, "a number above 0"),
    ],
)
def test_wrong_settings_are_found_at_start(config: dict[str, object], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        SearchTool(config=config)


@pytest.mark.parametrize(
    ("line", "why"),
    [("", "is empty"), ("[", ":1 is not JSON"), ('{"text": "x"}', ":1 has neither")],
)
def test_a_corpus_that_is_none_is_named_with_its_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(SetupError, match=why):
        Bm25Index.from_file(path)


class Service:
    """A retrieval service that answers from a list of responses."""

    def __init__(self, *responses: httpx.Response | Exception) -> None:
        self.responses = list(responses)
        self.waits: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        response = self.responses.pop(0)
        if isinstance(response, Exception):
            raise response
        return response

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    def client(self, attempts: int = 3) -> RetrievalService:
        service = RetrievalService("http://search/retrieve", attempts=attempts, sleep=self.sleep)
        service._http = httpx.AsyncClient(transport=httpx.MockTransport(self))
        return service


GOOD = httpx.Response(200, json={"result": [[{"document": {"contents": "a\nb"}, "score": 2}]]})


@pytest.mark.asyncio
async def test_a_service_that_is_busy_or_away_is_asked_again() -> None:
    service = Service(httpx.Response(503), httpx.ConnectError("refused"), GOOD)
    found = await service.client().retrieve(["q"], topk=1)
    assert found == [[Passage(contents="a\nb", score=2.0)]]
    assert service.waits == [1, 2]


@pytest.mark.parametrize(
    ("responses", "why"),
    [
        ([httpx.Response(504)] * 3, "in 3 attempts; the last: status 504"),
        ([httpx.ReadTimeout("slow")] * 3, "in 3 attempts; the last: ReadTimeout: slow"),
        ([httpx.Response(404, text="not here")], "status 404: 'not here'"),
        ([httpx.Response(200, text="<html>")], "does not speak Search-R1's protocol"),
        ([httpx.Response(200, json={"result": [[{}]]})], r"protocol \(KeyError: 'document'\)"),
        ([httpx.Response(200, json={"result": []})], "gave 0 answers to 1 queries"),
    ],
)
@pytest.mark.asyncio
async def test_what_the_service_lacks_is_not_the_models_fault(
    responses: list[httpx.Response | Exception], why: str
) -> None:
    with pytest.raises(ConnectionError, match=why):
        await Service(*responses).client().retrieve(["q"], topk=1)


@pytest.mark.asyncio
async def test_the_service_of_ours_and_its_client_understand_each_other(corpus: Path) -> None:
    service = RetrievalService("http://search/retrieve", attempts=1)
    transport = httpx.ASGITransport(app(Bm25Index.from_file(corpus)))
    service._http = httpx.AsyncClient(transport=transport)
    found = await service.retrieve(["France", "wheels"], topk=2)
    assert [[p.contents.partition("\n")[0] for p in passages] for passages in found] == [
        ["Paris"],
        ["Bicycles"],
    ]
    async with httpx.AsyncClient(transport=transport) as http:
        answer = await http.post("http://search/retrieve", json={"query": "x"})
    assert (answer.status_code, answer.json()["detail"]) == (422, "KeyError: 'queries'")
