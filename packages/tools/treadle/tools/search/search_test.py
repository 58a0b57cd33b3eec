import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

from treadle.agent_loop import AgentTask, LoopLimits, Message, SetupError, ToolFailure
from treadle.tools.search import SearchTool, bm25
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
        ({"retrieval_service_url": "http://x", "default_timeout": float("nan")}, "a number above"),
        ({"retrieval_service_url": "http://x", "num_workers": 0}, "num_workers must be an integer"),
        ({"retrieval_service_url": "http://x", "enable_global_rate_limit": 1}, "true or false"),
        ({"corpus_path": "x", "rate_limit": 3}, "rate_limit are for retrieval_service_url"),
    ],
)
def test_wrong_settings_are_found_at_start(config: dict[str, object], why: str) -> None:
    with pytest.raises(SetupError, match=why):
        SearchTool(config=config)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "is empty"),
        ("[", ":1 is not JSON"),
        ('{"text": "x"}', ":1 has neither"),
        ('{"contents": "the"}', "no word"),
    ],
)
def test_a_corpus_that_is_none_is_named_with_its_line(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(SetupError, match=why):
        Bm25Index.from_file(path)


@asynccontextmanager
async def entered(**settings: Any) -> AsyncIterator[RetrievalService]:
    service = RetrievalService("http://search/retrieve", **settings)
    await service.enter()
    yield service
    await service.leave()


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

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RetrievalService]:
        transport = httpx.MockTransport(self)
        async with entered(attempts=3, sleep=self.sleep, transport=transport) as service:
            yield service


GOOD = httpx.Response(200, json={"result": [[{"document": {"contents": "a\nb"}, "score": 2}]]})


@pytest.mark.asyncio
async def test_a_service_that_is_busy_or_away_is_asked_again() -> None:
    service = Service(httpx.Response(503), httpx.ConnectError("refused"), GOOD)
    async with service.client() as client:
        found = await client.retrieve(["q"], topk=1)
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
    async with Service(*responses).client() as client:
        with pytest.raises(ConnectionError, match=why):
            await client.retrieve(["q"], topk=1)


@pytest.mark.asyncio
async def test_the_service_of_ours_and_its_client_understand_each_other(corpus: Path) -> None:
    transport = httpx.ASGITransport(app(Bm25Index.from_file(corpus)))
    async with entered(attempts=1, transport=transport) as service:
        found = await service.retrieve(["France", "wheels"], topk=2)
    assert [[p.contents.partition("\n")[0] for p in passages] for passages in found] == [
        ["Paris"],
        ["Bicycles"],
    ]
    transport = httpx.ASGITransport(app(Bm25Index.from_file(corpus)))
    async with httpx.AsyncClient(transport=transport) as http:
        for body, why in [
            ({"query": "x"}, "KeyError: 'queries'"),
            ({"queries": "x"}, "TypeError: queries must be a list of strings"),
            ({"queries": ["x"], "topk": -1}, "TypeError: topk must be an integer from 1 to 1000"),
            ({"queries": ["x"], "topk": 1001}, "TypeError: topk must be an integer from 1 to 1000"),
        ]:
            answer = await http.post("http://search/retrieve", json=body)
            assert (answer.status_code, answer.json()["detail"]) == (422, why)
        deep = await http.post("http://search/retrieve", content=b"[" * 4000)
        assert deep.status_code == 422
        for content in (b'"' + b"x" * (1 << 20), b"[" * 100_000, b'["",' + b'"",' * 5000):
            answer = await http.post("http://search/retrieve", content=content)
            assert answer.status_code == 413
            assert "at most 1048576 bytes and 4096 queries" in answer.json()["detail"]


class Gate(httpx.AsyncBaseTransport):
    """Counts the requests under way, and lets none end before it is opened."""

    def __init__(self, wanted: int) -> None:
        self.under_way = self.most = 0
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._wanted = wanted

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way == self._wanted:
            self.reached.set()
        await self.opened.wait()
        self.under_way -= 1
        return httpx.Response(200, json={"result": [[]]})


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"num_workers": 2}, 4),
        ({"num_workers": 2, "rate_limit": 3}, 3),
        ({"num_workers": 2, "rate_limit": 9}, 4),
    ],
)
@pytest.mark.asyncio
async def test_requests_wait_for_a_place_in_the_process_and_in_the_host(
    settings: dict[str, int], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the host's limit is kept
    gate = Gate(most)
    # Two services stand for two processes.
    async with (
        entered(transport=gate, **settings) as one,
        entered(transport=gate, **settings) as two,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(4):
            for service in (one, two):
                group.create_task(service.retrieve(["q"], topk=1))
        await gate.reached.wait()
        gate.opened.set()
    assert gate.most == most


@pytest.mark.asyncio
async def test_a_service_that_is_silent_is_given_up_before_the_loop_gives_up_the_tool() -> None:
    async with entered(transport=Gate(1), patience_s=0.05) as service:
        with pytest.raises(ConnectionError, match=r"did not answer within 0\.05 s, in 1 attempts"):
            await service.retrieve(["q"], topk=1)
    limits = LoopLimits(max_response_tokens=1)
    assert RetrievalService("http://x")._patience_s < limits.tool_timeout_s


@pytest.mark.asyncio
async def test_connections_are_closed_with_the_last_trajectory() -> None:
    tool = SearchTool(config={"retrieval_service_url": "http://127.0.0.1:9/retrieve"})
    service = tool._retriever
    assert isinstance(service, RetrievalService)
    one, two = await tool.open(a_task()), await tool.open(a_task())
    opened = service._open
    assert opened is not None
    await one.aclose()
    assert not opened.http.is_closed
    await two.aclose()
    assert opened.http.is_closed
    again = await tool.open(a_task())
    assert service._open is not opened
    await again.aclose()


def test_a_corpus_may_hold_what_python_takes_for_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    entries = [{"title": "Rome\u2028hills", "text": "seven\x85nine"}, {"contents": "Paris"}]
    path.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in entries))
    assert len(Bm25Index.from_file(path)) == 2


def test_the_best_are_those_of_a_sort_of_all() -> None:
    chance = random.Random(3)
    for _ in range(300):
        scores = [chance.choice([0.0, 0.5, 1.0, 1.5]) for _ in range(chance.randrange(12))]
        topk = chance.randrange(1, 8)
        by_sorting = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
        wanted = [place for place in by_sorting if scores[place] > 0][:topk]
        assert bm25._best(numpy.array(scores), topk) == wanted
