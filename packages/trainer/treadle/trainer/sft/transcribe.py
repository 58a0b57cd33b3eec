"""Transcription: a demonstration -> the ledgers of rollouts in which the model said the same.

Invariant: an assistant's turn is sampled (loss mask True, including its end-of-turn token),
everything else, turns with the weight 0 included, is prompt or observed (loss mask False), and
the ids are those that an agent loop writes: the first prompt is rendered, the ids of a turn are
what the template writes behind the opened turn, and the renderer's extension follows them.
Imitation and reinforcement thus share one definition of what the model said, and a model fine-tuned
here sees the same tokens in its first rollout.

Some templates rewrite history: Qwen3's drops the reasoning of earlier turns when a user speaks
again. A turn whose rewritten prompt is not what the ledger holds begins a new ledger with the
prompt that inference would see, in which earlier turns are no longer under the loss. So each turn
is in the loss mask of exactly one ledger.

All functions are pure.
"""

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from treadle.agent_loop import (
    ChatRenderer,
    Completion,
    FinishingRenderer,
    FinishReason,
    Message,
    RenderError,
    TokenChunk,
    Tokens,
    ToolCall,
    ToolSpec,
    Transcript,
)
from treadle.policy.client.types import TrainSequence
from treadle.trainer.sft.demonstration import Demonstration

__all__ = ["train_sequences", "transcribe"]

_NEXT = Message(role="user", content="?")
"""Makes a template that ends a turn with the next header write the end of the last turn."""


def transcribe(renderer: ChatRenderer, demonstration: Demonstration) -> tuple[Tokens, ...]:
    """Writes the ledgers of rollouts in which the model said what the demonstration says.

    A turn ends with its first stop token, which would have ended the completion.

    Args:
        renderer: Renderer of the model to train.

    Returns:
        One ledger, and one more for each turn before which the template rewrites history, in the
        order of the turns, without those that would teach nothing. The log-probabilities are 0.0
        and the weight version is 0, as nothing was sampled.

    Raises:
        RenderError: The template refuses the conversation.
        ValueError: It cannot be told which ids the model would have said.
    """
    messages, tools = demonstration.messages, demonstration.tools
    turns = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
    ledgers: list[Transcript] = []
    before = 0
    for turn in turns:
        rendered = renderer.render(messages[:turn], tools=tools)
        prompt = rendered.ids
        if not ledgers or not _continues(
            renderer, ledgers[-1], messages, before, turn, tools, prompt
        ):
            ledgers.append(Transcript(prompt, images=rendered.images))
        said = _said(renderer, messages, turn, tools, prompt)
        _check_complete(renderer, messages[turn], turn, said)
        _check_calls(renderer, messages[turn], turn, said, tools, prompt)
        if turn in demonstration.unlearned:
            ledgers[-1].observe(said)
        else:
            chunk = TokenChunk(token_ids=said, logprobs=(0.0,) * len(said), weight_version=0)
            ledgers[-1].sample(Completion(chunks=(chunk,), finish=FinishReason.STOP))
        before = turn + 1
    return tuple(tokens for ledger in ledgers if any((tokens := ledger.freeze()).loss_mask))


def _continues(
    renderer: ChatRenderer,
    ledger: Transcript,
    messages: Sequence[Message],
    start: int,
    turn: int,
    tools: Sequence[ToolSpec],
    prompt: Sequence[int],
) -> bool:
    """Extends the ledger by `messages[start:turn]`, if it then reads as the prompt does."""
    try:
        extension = renderer.extend(
            ledger.ids, messages[start:turn], tools=tools, history=messages[:start]
        )
    except RenderError:  # this template cannot be extended here; it can be rendered
        return False
    ids = (*ledger.ids, *extension.ids)
    # Texts are compared where ids differ: a tokenizer may join a header's end and a turn's start.
    if ids != tuple(prompt) and renderer.decode(ids) != renderer.decode(prompt):
        return False
    ledger.observe(extension.ids, images=extension.images)
    return True


def _said(
    renderer: ChatRenderer,
    messages: Sequence[Message],
    turn: int,
    tools: Sequence[ToolSpec],
    prompt: tuple[int, ...],
) -> tuple[int, ...]:
    """Returns the ids of a turn, as the template writes it behind the opened turn."""
    message, stops = messages[turn], renderer.stop_token_ids
    calls = ((f"its call {call.name!r:.80}", _as_text(call)) for call in message.tool_calls)
    for where, text in (
        ("its content", message.content),
        ("its reasoning", message.reasoning or ""),
        *calls,
    ):
        if found := [token for token in renderer.encode(text) if token in stops]:
            raise ValueError(
                f"message {turn} contains {renderer.decode(found[:1])!r}, which ends a turn, in "
                f"{where}, {text[:80]!r}: a model that says it stops there. Remove it"
            )
    is_behind = False
    for closed in _closed(renderer, messages, turn, tools):
        written = _behind(renderer, prompt, closed)
        is_behind |= written is not None
        for end, token in enumerate(written or (), start=1):
            if token in stops:
                assert written is not None
                return written[:end]
    if not is_behind:
        raise ValueError(
            f"the chat template does not write message {turn} behind the turn that it opens for "
            f"the model, which ends with {renderer.decode(prompt)[-40:]!r}: what the model would "
            "have said is not known. Set agent.template_kwargs so that both agree (as "
            "enable_thinking), or give the message the reasoning that the template opens"
        )
    raise ValueError(
        f"the chat template ends message {turn} with none of the renderer's stop token ids {stops}"
    )


def _closed(
    renderer: ChatRenderer, messages: Sequence[Message], turn: int, tools: Sequence[ToolSpec]
) -> Iterator[tuple[int, ...]]:
    """Yields the ways in which a template may write a turn, and its end."""
    spoken, following = messages[: turn + 1], messages[turn + 1 : turn + 2] or (_NEXT,)
    for shown in (spoken, (*spoken, *following)):
        yield renderer.render(shown, tools=tools).ids
    if isinstance(renderer, FinishingRenderer):
        yield renderer.render_finished(spoken, tools=tools)


def _check_complete(
    renderer: ChatRenderer, message: Message, turn: int, said: tuple[int, ...]
) -> None:
    """Rejects a turn of which the template leaves something out: it would not be learned."""
    text = unicodedata.normalize("NFC", renderer.decode(said))
    for what, part in (("content", message.content), ("reasoning", message.reasoning or "")):
        if unicodedata.normalize("NFC", part.strip()) not in text:
            raise ValueError(
                f"the chat template leaves out the {what} of message {turn}, {part[:40]!r}: it "
                "would not be learned. Remove it, or take a template that writes it"
            )


def _check_calls(
    renderer: ChatRenderer,
    message: Message,
    turn: int,
    said: tuple[int, ...],
    tools: Sequence[ToolSpec],
    prompt: tuple[int, ...],
) -> None:
    """Rejects a turn whose calls a rollout would not read as they are: others would be learned."""
    if not message.tool_calls:
        return
    parsed = renderer.parse(said, tools=tools, prompt=prompt)
    read = parsed.message.tool_calls
    if parsed.malformed or len(read) != len(message.tool_calls):
        same = False
    else:
        same = all(map(_is_same, message.tool_calls, read))
    if not same:
        wanted = "; ".join(map(_as_text, message.tool_calls))
        found = [*map(_as_text, read), *(f"malformed: {bad.reason}" for bad in parsed.malformed)]
        raise ValueError(
            f"message {turn} has the calls {wanted[:200]}, and in the turn that the chat template "
            f"writes, {renderer.decode(said)[:200]!r}, the parser reads "
            f"{'; '.join(found)[:200] or 'none'}: something else would be learned. Take a template "
            "that writes them, and its parser (agent.parser), or change the calls"
        )


def _is_same(given: ToolCall, read: ToolCall) -> bool:
    """Compares calls; a value may be read as its text, as formats without types write it."""
    return (
        given.name == read.name
        and given.arguments.keys() == read.arguments.keys()
        and all(
            not _forms(value).isdisjoint(_forms(read.arguments[key]))
            for key, value in given.arguments.items()
        )
    )


def _forms(value: object) -> set[str]:
    """Returns the texts that a template may write for a value; a tokenizer may compose Unicode."""
    forms = {_dumped(value), str(value).strip()}
    if isinstance(value, str):
        try:
            forms.add(_dumped(json.loads(value)))
        except ValueError:  # a text that is no JSON
            forms.add(value.strip())
    return {unicodedata.normalize("NFC", form) for form in forms}


def _as_text(call: ToolCall) -> str:
    return f"{call.name} {_dumped(call.arguments)}"


def _dumped(value: object) -> str:
    value = dict(value) if isinstance(value, Mapping) else value
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _behind(
    renderer: ChatRenderer, prompt: tuple[int, ...], closed: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Returns what `closed` has behind `prompt`, as ids that begin there; None if it differs.

    Of earlier turns the template may leave something out as soon as there is an answer (gpt-oss's
    the reasoning of calls): then it is what is behind all that followed the turn before.
    """
    if closed[: len(prompt)] == prompt:
        return closed[len(prompt) :]
    head, text = renderer.decode(prompt), renderer.decode(closed)
    if text.startswith(head):
        return renderer.encode(text[len(head) :])
    ends = [at for at, token in enumerate(prompt, start=1) if token in renderer.stop_token_ids]
    tail = renderer.decode(prompt[ends[-1] :]) if ends else ""
    if tail and text.count(tail) == head.count(tail):
        return renderer.encode(text[text.rindex(tail) + len(tail) :])
    return None


def train_sequences(
    ledgers: Sequence[Tokens], *, conversation: int | None = None
) -> tuple[TrainSequence, ...]:
    """Returns ledgers as training input: advantage 1 on what the model said, 0 elsewhere.

    Args:
        conversation: Its number in the batch, by which several ledgers count as one sequence in the
            loss; None will do for a single one.
    """
    return tuple(
        TrainSequence(
            ids=tokens.ids,
            loss_mask=tokens.loss_mask,
            rollout_logprobs=tokens.logprobs,
            advantages=tuple(map(float, tokens.loss_mask)),
            trajectory=conversation,
            images=tokens.images,
        )
        for tokens in ledgers
    )
