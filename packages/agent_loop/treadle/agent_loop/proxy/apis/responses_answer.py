"""The answer of the Responses API: a turn as its items, whole or as a stream of events.

Invariant: pure; the last event of a stream has the whole answer, with the same items as its events.
Reasoning comes before text, and calls, which are complete at the end of a turn, after it. A stream
writes each event once, in one pass.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from treadle.agent_loop.capture import CapturedTurn, TurnDelta
from treadle.agent_loop.proxy.apis.common import AgentRequest, event
from treadle.agent_loop.proxy.errors import ApiError
from treadle.agent_loop.tokens.renderer import ChatRenderer
from treadle.agent_loop.types import FinishReason


class ResponsesAnswer:
    """Writes one answer; an `AnswerWriter`.

    Args:
        created: Seconds since the Unix epoch.
    """

    def __init__(
        self,
        *,
        answer_id: str,
        created: int,
        model: str,
        request: AgentRequest,
        renderer: ChatRenderer,
    ) -> None:
        self.id = answer_id
        self._created = created
        self._model = model
        self._request = request
        self._renderer = renderer
        self._number = 0
        self._open: str | None = None
        self._texts: dict[str, str] = {}

    def whole(self, turns: Sequence[CapturedTurn]) -> dict[str, object]:
        """Returns the JSON object of the answer."""
        (turn,) = turns
        cut = turn.finish is FinishReason.LENGTH
        prompt, sampled = turn.num_prompt_tokens, turn.completion.num_tokens
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": turn.completion.cached_prompt_tokens},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        }
        return self._response(
            "incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=self._items(turn),
            usage=usage,
        )

    def begin(self) -> Iterator[bytes]:
        """Yields the answer without items."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def delta(self, index: int, delta: TurnDelta) -> Iterator[bytes]:
        """Yields what has been added to the reasoning or the text."""
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add("message", delta.content)

    def end(self, turns: Sequence[CapturedTurn]) -> Iterator[bytes]:
        """Yields the calls, and the whole answer."""
        (turn,) = turns
        yield from self._close()
        items = self._items(turn)
        for place, item in enumerate(items):
            if item["type"] == "function_call":
                yield from self._call(place, item)
            elif item["type"] == "message" and "message" not in self._texts:
                yield from self._begin("message")  # without a text
                yield from self._close()
        response = self.whole(turns)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yields the error, which OpenAI's clients raise."""
        body = error.body["error"]
        assert isinstance(body, dict)
        yield self._event("error", error=body, **{k: body[k] for k in ("code", "message", "param")})

    def _items(self, turn: CapturedTurn) -> list[dict[str, object]]:
        message, namespaces = turn.parsed.message, self._request.namespaces
        items: list[dict[str, object]] = []
        if message.reasoning:
            items.append(self._item("reasoning", message.reasoning))
        if message.content or not message.tool_calls:
            tokens = [
                pair
                for chunk in turn.completion.chunks
                for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)
            ]
            items.append(self._item("message", message.content, tokens))
        items += [
            {
                "type": "function_call",
                "id": f"fc_{self.id}_{number}",
                "call_id": call.id,
                "name": call.name,
                **({"namespace": namespaces[call.name]} if call.name in namespaces else {}),
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
                "status": "completed",
            }
            for number, call in enumerate(message.tool_calls)
        ]
        return items

    def _item(
        self, kind: str, text: str | None, tokens: Sequence[tuple[int, float]] = ()
    ) -> dict[str, object]:
        """Returns an item of reasoning or text; without its content if the text is None."""
        status = "in_progress" if text is None else "completed"
        content: list[dict[str, object]]
        if kind == "reasoning":
            content = [] if text is None else [{"type": "reasoning_text", "text": text}]
            head: dict[str, object] = {"type": kind, "id": f"rs_{self.id}", "summary": []}
        else:
            content = [] if text is None else [self._part(text, tokens)]
            head = {"type": kind, "id": f"msg_{self.id}", "role": "assistant"}
        return {**head, "content": content, "status": status}

    def _part(self, text: str, tokens: Sequence[tuple[int, float]] = ()) -> dict[str, object]:
        logprobs = [
            {
                "token": self._renderer.decode([token]),
                "logprob": logprob,
                "bytes": [],
                "top_logprobs": [],
            }
            for token, logprob in (tokens if self._request.logprobs else ())
        ]
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _add(self, kind: str, text: str) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._close()
            yield from self._begin(kind)
        self._texts[kind] += text
        yield self._text_event(kind, "delta", delta=text)

    def _begin(self, kind: str) -> Iterator[bytes]:
        place = len(self._texts)
        self._open, self._texts[kind] = kind, ""
        item = self._item(kind, None)
        yield self._event("response.output_item.added", output_index=place, item=item)
        if kind == "message":
            yield self._event("response.content_part.added", **self._at(kind), part=self._part(""))

    def _close(self) -> Iterator[bytes]:
        if (kind := self._open) is None:
            return
        self._open, text = None, self._texts[kind]
        yield self._text_event(kind, "done", text=text)
        if kind == "message":
            yield self._event("response.content_part.done", **self._at(kind), part=self._part(text))
        item = self._item(kind, text)
        place = list(self._texts).index(kind)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _call(self, place: int, item: Mapping[str, object]) -> Iterator[bytes]:
        begun = {**item, "arguments": "", "status": "in_progress"}
        at = {"output_index": place, "item_id": item["id"]}
        text = item["arguments"]
        yield self._event("response.output_item.added", output_index=place, item=begun)
        yield self._event("response.function_call_arguments.delta", **at, delta=text)
        yield self._event(
            "response.function_call_arguments.done", **at, name=item["name"], arguments=text
        )
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _text_event(self, kind: str, what: str, **values: object) -> bytes:
        if kind == "reasoning":
            return self._event(f"response.reasoning_text.{what}", **self._at(kind), **values)
        return self._event(f"response.output_text.{what}", **self._at(kind), logprobs=[], **values)

    def _at(self, kind: str) -> dict[str, object]:
        return {
            "item_id": self._item(kind, None)["id"],
            "output_index": list(self._texts).index(kind),
            "content_index": 0,
        }

    def _response(
        self,
        status: str,
        *,
        output: Sequence[object] = (),
        incomplete_details: object = None,
        usage: object = None,
    ) -> dict[str, object]:
        request = self._request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": incomplete_details,
            "instructions": None,
            "max_output_tokens": request.max_tokens,
            "model": self._model,
            "output": list(output),
            "parallel_tool_calls": True,
            "store": request.store,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.parameters),
                    "strict": False,
                }
                for tool in request.tools
            ],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": {},
        }

    def _event(self, kind: str, **values: object) -> bytes:
        written = event({"type": kind, "sequence_number": self._number, **values}, name=kind)
        self._number += 1
        return written
