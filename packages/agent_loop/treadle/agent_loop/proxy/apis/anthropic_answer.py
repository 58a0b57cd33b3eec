"""The answer of Anthropic's Messages API: a turn as its blocks, whole or as a stream of events.

Invariant: pure; the events of a stream add up to the whole answer. Reasoning is a `thinking` block
without signature; calls, which are complete at the end of a turn, come last. The number of tokens
of the prompt comes at the end of a stream, because the stream begins before it is counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from treadle.agent_loop.capture import CapturedTurn, TurnDelta
from treadle.agent_loop.proxy.apis.common import event
from treadle.agent_loop.proxy.errors import ApiError
from treadle.agent_loop.types import FinishReason, ToolCall

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class AnthropicAnswer:
    """Writes one answer; an `AnswerWriter`."""

    def __init__(self, *, answer_id: str, model: str) -> None:
        self.id = answer_id
        self._model = model
        self._blocks = 0
        self._open: str | None = None

    def whole(self, turns: Sequence[CapturedTurn]) -> dict[str, object]:
        """Returns the JSON object of the answer."""
        (turn,) = turns
        message = turn.parsed.message
        content: list[dict[str, object]] = []
        if message.reasoning:
            content.append({**_begun("thinking"), "thinking": message.reasoning})
        if message.content:
            content.append({**_begun("text"), "text": message.content})
        content += [{**_call(call), "input": dict(call.arguments)} for call in message.tool_calls]
        return {**self._head(content), **_ending(turn), "usage": _usage(turn)}

    def begin(self) -> Iterator[bytes]:
        """Yields the message without blocks."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        head = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _event("message_start", message=head)

    def delta(self, index: int, delta: TurnDelta) -> Iterator[bytes]:
        """Yields what has been added to the reasoning or the text."""
        for kind, text in (("thinking", delta.reasoning), ("text", delta.content)):
            if text:
                if self._open != kind:
                    yield from self._close()
                    yield from self._begin(kind, _begun(kind))
                yield self._delta({"type": f"{kind}_delta", kind: text})

    def end(self, turns: Sequence[CapturedTurn]) -> Iterator[bytes]:
        """Yields the calls, why the turn ended, and the numbers of tokens."""
        (turn,) = turns
        yield from self._close()
        for call in turn.parsed.message.tool_calls:
            yield from self._begin("tool_use", _call(call))
            text = json.dumps(dict(call.arguments), ensure_ascii=False)
            yield self._delta({"type": "input_json_delta", "partial_json": text})
            yield from self._close()
        yield _event("message_delta", delta=_ending(turn), usage=_usage(turn))
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yields the error, which Anthropic's clients raise."""
        yield event(error_body(error), name="error")

    def _head(self, content: Sequence[object]) -> dict[str, object]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
        }

    def _begin(self, kind: str, block: Mapping[str, object]) -> Iterator[bytes]:
        self._open = kind
        yield _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._blocks)
            self._open = None
            self._blocks += 1


def error_body(error: ApiError) -> dict[str, object]:
    """Returns an error as Anthropic's API writes it."""
    kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else _ERRORS[400])
    text = str(error)
    if error.code == "context_length_exceeded":  # What coding agents look for to compact.
        text = f"prompt is too long: {text}"
    return {"type": "error", "error": {"type": kind, "message": text}}


def _begun(kind: str) -> dict[str, object]:
    if kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _call(call: ToolCall) -> dict[str, object]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _ending(turn: CapturedTurn) -> dict[str, object]:
    if turn.finish is FinishReason.LENGTH:
        reason = "max_tokens"
    elif turn.parsed.message.tool_calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if turn.stop_string is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": turn.stop_string}


def _usage(turn: CapturedTurn) -> dict[str, object]:
    cached = turn.completion.cached_prompt_tokens
    return {
        "input_tokens": turn.num_prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": turn.completion.num_tokens,
    }


def _event(kind: str, **values: object) -> bytes:
    return event({"type": kind, **values}, name=kind)
