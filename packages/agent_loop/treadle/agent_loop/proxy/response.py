"""The answer to a chat completion: a turn as OpenAI's JSON, whole or as a stream.

Invariant: pure; both forms have the same content. A turn is sampled completely before anything is
sent, so all parts of a stream come at once: agents that read streams work, and a failed request
still gets an error status.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

from treadle.agent_loop.capture import CapturedTurn
from treadle.agent_loop.proxy.messages import written, written_call
from treadle.agent_loop.proxy.request import ChatRequest
from treadle.agent_loop.tokens.renderer import ChatRenderer
from treadle.agent_loop.types import FinishReason

STREAM_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """A sampled turn and its request.

    Attributes:
        id: Id of the completion.
        created: Unix time, seconds.
        model: Name of the model.
        request: The request.
        turn: The sampled turn.
    """

    id: str
    created: int
    model: str
    request: ChatRequest
    turn: CapturedTurn

    def whole(self, renderer: ChatRenderer) -> dict[str, object]:
        """Returns the JSON object of an answer that is not a stream."""
        choice: dict[str, object] = {
            "index": 0,
            "message": written(self.turn.parsed.message),
            "logprobs": self._logprobs(renderer),
            "finish_reason": self._finish_reason,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage}

    def stream(self, renderer: ChatRenderer) -> Iterator[bytes]:
        """Yields the events of a stream, including the final one."""
        message = self.turn.parsed.message
        first: dict[str, object] = {"role": "assistant", "content": ""}
        yield self._event(first)
        if message.reasoning:
            yield self._event({"reasoning_content": message.reasoning})
        logprobs = self._logprobs(renderer)
        if message.content or logprobs is not None:
            yield self._event({"content": message.content}, logprobs=logprobs)
        for index, call in enumerate(message.tool_calls):
            yield self._event({"tool_calls": [{"index": index, **written_call(call)}]})
        yield self._event({}, finish_reason=self._finish_reason)
        if self.request.include_usage:
            yield _data(
                {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage}
            )
        yield STREAM_END

    def _event(
        self, delta: dict[str, object], *, logprobs: object = None, finish_reason: str | None = None
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return _data({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @property
    def _finish_reason(self) -> str:
        if self.turn.finish is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.turn.parsed.message.tool_calls else "stop"

    @property
    def _usage(self) -> dict[str, object]:
        prompt, sampled = self.turn.num_prompt_tokens, self.turn.completion.num_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": self.turn.completion.cached_prompt_tokens},
        }

    def _logprobs(self, renderer: ChatRenderer) -> dict[str, object] | None:
        """Returns those of all sampled tokens, including the calls and the end of the turn."""
        if not self.request.logprobs:
            return None
        tokens: list[dict[str, object]] = [
            {"token": renderer.decode([token]), "logprob": p, "bytes": None, "top_logprobs": []}
            for chunk in self.turn.completion.chunks
            for token, p in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ]
        return {"content": tokens, "refusal": None}


def _data(event: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
