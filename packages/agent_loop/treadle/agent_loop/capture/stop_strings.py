"""Stop strings: strings that end a completion, for engines that only stop at ids.

Invariant: the completion is cut after the token that completes the first stop string. A token does
not depend on later ones, so the kept tokens have the distribution and the log-probabilities of an
engine that stops there. The only cost is that the later tokens were sampled in vain. The text ends
before the stop string, as agents expect. Pure.
"""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.agent_loop.tokens.renderer import ChatRenderer, ParsedCompletion
from treadle.agent_loop.types import Completion, FinishReason, Message, TokenChunk, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CutCompletion:
    """A completion up to its stop string, or a whole one without stop string.

    Attributes:
        completion: The tokens, including those of the stop string.
        parsed: The message without the stop string.
        uncut: The message's text with the stop string; None if the text was not cut.
    """

    completion: Completion
    parsed: ParsedCompletion
    uncut: str | None = None


def cut_at_stop(
    completion: Completion,
    stop: Sequence[str],
    renderer: ChatRenderer,
    *,
    tools: Sequence[ToolSpec] = (),
    prompt: Sequence[int] = (),
) -> CutCompletion:
    """Cuts a completion at the first stop string, and parses it.

    Args:
        tools: Without tools, calls stay in the text.
    """
    ids = completion.token_ids
    read = functools.partial(_read, renderer, tools=tools, prompt=prompt)

    def is_complete(size: int) -> bool:
        text = renderer.decode(ids[:size])
        return any(word in text for word in stop)

    if not stop or not is_complete(len(ids)):
        return CutCompletion(completion=completion, parsed=read(ids))
    size = bisect.bisect_left(range(len(ids)), True, key=lambda index: is_complete(index + 1)) + 1
    parsed = read(ids[:size])
    text = parsed.message.content
    found = [(text.find(word), word) for word in stop if word in text]
    ended = size == len(ids) and completion.finish is FinishReason.STOP
    kept = completion if ended else _first(completion, size)
    if not found:
        return CutCompletion(completion=kept, parsed=parsed)
    start, word = min(found)
    return CutCompletion(
        completion=kept,
        parsed=replace(parsed, message=replace(parsed.message, content=text[:start])),
        uncut=text[: start + len(word)],
    )


def _read(
    renderer: ChatRenderer,
    ids: Sequence[int],
    *,
    tools: Sequence[ToolSpec],
    prompt: Sequence[int],
) -> ParsedCompletion:
    parsed = renderer.parse(ids, tools=tools, prompt=prompt)
    if tools or not parsed.requests:
        return parsed
    size = len(ids)
    while size and ids[size - 1] in renderer.stop_token_ids:
        size -= 1
    text = renderer.decode(ids[:size])[parsed.content_start :]
    message = Message(role="assistant", content=text, reasoning=parsed.message.reasoning)
    return ParsedCompletion(message=message, content_start=parsed.content_start)


def _first(completion: Completion, size: int) -> Completion:
    chunks: list[TokenChunk] = []
    for chunk in completion.chunks:
        if size <= 0:
            break
        chunks.append(
            replace(
                chunk,
                token_ids=chunk.token_ids[:size],
                logprobs=chunk.logprobs[:size],
                sampling_masks=chunk.sampling_masks[:size],
            )
        )
        size -= len(chunk.token_ids)
    return replace(completion, chunks=tuple(chunks), finish=FinishReason.STOP)
