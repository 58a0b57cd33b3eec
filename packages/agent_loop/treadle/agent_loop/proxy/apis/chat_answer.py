"""The answer to a chat completion: turns as OpenAI's JSON, whole or as a stream.

Invariant: pure; both forms have the same content. A stream sends text as it is sampled, and calls
at the end of their turn, because the parser needs the whole turn to recognise them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from treadle.agent_loop.capture import CapturedTurn, TurnDelta
from treadle.agent_loop.proxy.apis.common import AgentRequest, event
from treadle.agent_loop.proxy.errors import ApiError
from treadle.agent_loop.proxy.messages import written, written_call
from treadle.agent_loop.tokens.renderer import ChatRenderer
from treadle.agent_loop.types import FinishReason

STREAM_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """Writes the answer to a chat completion; an `AnswerWriter`.

    Attributes:
        created: Seconds since the Unix epoch.
    """

    id: str
    created: int
    model: str
    request: AgentRequest
    renderer: ChatRenderer

    def whole(self, turns: Sequence[CapturedTurn]) -> dict[str, object]:
        """Returns the JSON object of an answer that is not a stream."""
        choices = [
            {
                "index": index,
                "message": written(turn.parsed.message),
                "logprobs": self._logprobs(
                    [
                        pair
                        for chunk in turn.completion.chunks
                        for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)
                    ]
                ),
                "finish_reason": finish_reason(turn),
            }
            for index, turn in enumerate(turns)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(turns)}

    def begin(self) -> Iterator[bytes]:
        """Yields the role of each message."""
        for index in range(self.request.n):
            yield self._event(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: TurnDelta) -> Iterator[bytes]:
        """Yields what has been added to a message."""
        if delta.reasoning:
            yield self._event(index, {"reasoning_content": delta.reasoning})
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        if delta.content or logprobs is not None:
            yield self._event(index, {"content": delta.content}, logprobs=logprobs)

    def end(self, turns: Sequence[CapturedTurn]) -> Iterator[bytes]:
        """Yields the calls, why each turn ended, and the usage if requested."""
        for index, turn in enumerate(turns):
            for number, call in enumerate(turn.parsed.message.tool_calls):
                yield self._event(index, {"tool_calls": [{"index": number, **written_call(call)}]})
            yield self._event(index, {}, finish_reason=finish_reason(turn))
        if self.request.include_usage:
            yield event(
                {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(turns)}
            )
        yield STREAM_END

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yields the error, which OpenAI's clients raise."""
        yield event(error.body)

    def _event(
        self,
        index: int,
        delta: Mapping[str, object],
        *,
        logprobs: object = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, tokens: Sequence[tuple[int, float]]) -> dict[str, object] | None:
        """Returns those of sampled tokens, including the calls and the end of the turn."""
        if not self.request.logprobs:
            return None
        content: list[dict[str, object]] = [
            {
                "token": self.renderer.decode([token]),
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in tokens
        ]
        return {"content": content, "refusal": None}


def finish_reason(turn: CapturedTurn) -> str:
    """Returns why a turn ended, as OpenAI names it."""
    if turn.finish is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if turn.parsed.message.tool_calls else "stop"


def usage(turns: Sequence[CapturedTurn]) -> dict[str, object]:
    """Returns the numbers of tokens, of the prompt once."""
    prompt = turns[0].num_prompt_tokens
    sampled = sum(turn.completion.num_tokens for turn in turns)
    cached = turns[0].completion.cached_prompt_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
