"""An address that answers in other ways than an API: each is an error that names it."""

import asyncio
import json
import math
from collections.abc import Mapping

import pytest

from treadle.agent_loop import (
    Completion,
    EngineFailedError,
    Message,
    RequestContext,
    SamplingParams,
    SetupError,
)
from treadle.tracing.sinks.testing import Answer, Request, http_server
from treadle.trainer.rollout.chat_api.model import ApiServers
from treadle.trainer.rollout.chat_api.renderer import ApiRenderer

_HTML = b"<html>hello</html>"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def _sampled(
    answer: bytes, *, listed: bytes = b'{"data": []}', kind: str = "application/json"
) -> tuple[ApiRenderer, Completion]:
    """Returns what one request for a reply gives."""

    def served(request: Request) -> Answer:
        return 200, kind, listed if request.method == "GET" else answer

    renderer = ApiRenderer()
    prompt = renderer.render([Message(role="user", content="6 * 7?")], tools=()).ids
    request = RequestContext(session_id="s", request_id="r", deadline=math.inf)
    with http_server(served) as url:
        async with ApiServers(f"{url}/v1", "m", renderer) as servers:
            params = SamplingParams(max_tokens=9)
            return renderer, await servers.generate(prompt, params, request=request)


def _answer(message: Mapping[str, object], **choice: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, **choice}]}).encode()


def _with_call(arguments: object) -> bytes:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return _answer({"role": "assistant", "content": None, "tool_calls": [call]})


@pytest.mark.asyncio
@pytest.mark.parametrize("key", ["sk-sec\nret", "sk-secrét", "sk-\x07secret"])
async def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(SetupError, match="OPENAI_API_KEY is no key") as refused:
        ApiServers("http://127.0.0.1:9/v1", "m", ApiRenderer())
    assert "sec" not in str(refused.value)


@pytest.mark.asyncio
async def test_the_end_of_a_line_after_a_key_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\n")
    sent: list[str] = []

    def served(request: Request) -> Answer:
        sent.append(request.headers["authorization"])
        return 200, "application/json", b"[]"

    with http_server(served) as url:
        async with ApiServers(url, "m", ApiRenderer()):
            pass
    assert sent == ["Bearer sk-1"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("listed", "kind"), [(_HTML, "text/html"), (b"{nope", "application/json"), (b"", "text/plain")]
)
async def test_an_address_that_lists_no_models_is_no_api(listed: bytes, kind: str) -> None:
    with pytest.raises(
        SetupError, match=r"/v1 is not the base of an .* API: the answer is not JSON"
    ):
        await _sampled(b"", listed=listed, kind=kind)


@pytest.mark.asyncio
@pytest.mark.parametrize("url", ["http://host:99999/v1", "http://[::1/v1", "http://a..b/v1"])
async def test_an_address_that_the_client_refuses_is_named(url: str) -> None:
    with pytest.raises(SetupError) as refused:
        async with ApiServers(url, "m", ApiRenderer()):
            pass
    assert url in str(refused.value)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "kind", "cause"),
    [
        (_HTML, "text/html", "is not JSON .*; it begins '<html>hello</html>'"),
        (b"{nope", "application/json", "is not JSON"),
        (b"[" * 100_000, "application/json", "is not JSON"),
        (b'{"error": "quota"}', "application/json", r"choices: Field required.*\"quota\""),
        (b'{"choices": []}', "application/json", "choices: List should have at least 1"),
        (b'{"choices": [{}]}', "application/json", r"choices\.0\.message: Field required"),
        (_with_call({"a": 1}), "application/json", r"function\.arguments: Input should be a valid"),
    ],
)
async def test_an_answer_that_is_no_completion_names_the_address(
    answer: bytes, kind: str, cause: str
) -> None:
    with pytest.raises(EngineFailedError, match=rf"http://127\.0\.0\.1:\d+/v1: m: .*{cause}"):
        await _sampled(answer, kind=kind)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("42", "42"),
        ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], "42"),
        ([{"type": "thinking", "thinking": []}, {"type": "text", "text": "42"}], "42"),
        (None, ""),
        ("a\ud83d", "a?"),
    ],
)
async def test_a_reply_is_its_text(content: object, text: str) -> None:
    renderer, completion = await _sampled(_answer({"content": content}, finish_reason="stop"))
    assert renderer.parse(completion.token_ids).message.content == text
    assert all(map(math.isnan, completion.chunks[0].logprobs))


@pytest.mark.asyncio
@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 101 + "1" + "}" * 101])
async def test_arguments_that_are_nested_too_deeply_are_a_malformed_call(arguments: str) -> None:
    renderer, completion = await asyncio.wait_for(_sampled(_with_call(arguments)), 10)
    (bad,) = renderer.parse(completion.token_ids).malformed
    assert bad.reason == "the arguments are nested in more than 100 levels"
