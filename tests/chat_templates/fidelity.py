"""Compares a conversation rendered turn by turn with the same one rendered whole.

Invariant: the model of these conversations writes what the template writes, token for token, and
stops at the first stop id. So every difference between the two renderings is one of boundaries, or
of what the template makes of turns that are past.
"""

import enum
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from chat_templates.conversations import REASONING, TOOLS, Conversation
from treadle.agent_loop import RenderError, SetupError
from treadle.agent_loop.hf import HfRenderer

Ids: TypeAlias = tuple[int, ...]

_MARKS = ("<think", "<|START_THINKING|>", "<|channel>thought", "Here are my reasoning steps:")


class Verdict(enum.StrEnum):
    """What came of one conversation."""

    EXACT = "exact"
    """Turn by turn gives the ids of the whole, at every turn."""
    PAST = "past"
    """What is appended is exact, but the template rewrites turns that are past."""
    REFUSED = "refused"
    """The template does not take this conversation, or the renderer refuses it."""
    SPLIT = "split"
    """The template writes a part of the turn behind its end, so no model samples it as one."""
    WRONG = "wrong"
    """What is appended is not what the template writes. Must not happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one conversation.

    Attributes:
        conversation: Its name.
        verdict: See there.
        cause: Where the renderings part, or who refuses and why.
    """

    conversation: str
    verdict: Verdict
    cause: str = ""


def compare(renderer: HfRenderer, tokenizer: Any, conversation: Conversation) -> Finding:
    """Renders one conversation in both ways."""
    comparison = _Comparison(renderer, tokenizer, conversation)
    try:
        verdict, cause = comparison.run()
    except (RenderError, SetupError) as error:
        verdict, cause = Verdict.REFUSED, " ".join(str(error).split())
    return Finding(conversation=conversation.name, verdict=verdict, cause=cause)


class _Comparison:
    def __init__(self, renderer: HfRenderer, tokenizer: Any, conversation: Conversation) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._messages = conversation.messages
        self._tools = TOOLS if conversation.tools else ()
        self._stops = renderer.stop_token_ids
        self._ends: list[int] = []

    def run(self) -> tuple[Verdict, str]:
        """Goes through the turns."""
        renderer, messages = self._renderer, self._messages
        place = self._next_turn(0)
        ids = renderer.render(messages[:place], tools=self._tools).ids
        if ids != self._encode(self._whole(place, open_turn=True)):
            return Verdict.WRONG, "the first prompt differs"
        cause = ""
        while (stop := self._next_turn(place + 1)) < len(messages):
            following = self._encode(self._whole(stop, open_turn=True))
            turn = self._sampled(place, stop)
            ids += turn
            self._ends.append(len(ids) - 1)
            extension = renderer.extend(
                ids, messages[place + 1 : stop], tools=self._tools, history=messages[: place + 1]
            ).ids
            ids += extension
            if part := self._apart(place, stop, turn):
                return Verdict.SPLIT, f"it writes {part!r} apart from the rest of its turn"
            if not self._follows(turn, extension, following):
                return Verdict.WRONG, self._parting(ids, following)
            if ids != following:
                cause = cause or self._explained(ids, following)
            place = stop
        return (Verdict.PAST, cause) if cause else (Verdict.EXACT, "")

    def _sampled(self, place: int, stop: int) -> Ids:
        """The ids of a turn as a model writes it behind the open header.

        They are those of the template up to the first stop id. If the template does not begin the
        turn with the open header, they are what comes after the part of the header that it has.
        """
        prompt, closed = self._whole(place, open_turn=True), self._whole(place + 1, open_turn=False)
        prompt_ids, ids = self._encode(prompt), self._encode(closed)
        if ids[: len(prompt_ids)] == prompt_ids:
            turns = [ids[len(prompt_ids) :]]
        else:
            header = prompt[_shared(prompt, self._whole(place, open_turn=False)) :]
            header = header or self._renderer.decode(prompt_ids[-1:])
            turns = [self._encode(closed[i:]) for i in _starts(prompt, header, closed)]
        turn = min(turns, key=lambda turn: len(self._missing(place, turn)))
        size = next((i + 1 for i, token in enumerate(turn) if token in self._stops), 0)
        if size:
            return turn[:size]
        return (*turn, *self._closed_later(closed[-8:], self._whole(stop, open_turn=True)))

    def _follows(self, turn: Ids, extension: Ids, following: Ids) -> bool:
        """Whether the whole ends with the end of the turn's text, one token, and the extension.

        But for space before that token: some templates put it there only when something follows.
        """
        if following[-len(extension) :] != extension:
            return False
        decode = self._renderer.decode
        before = decode(following[: -len(extension) - 1]).rstrip()
        return before.endswith(decode(turn[:-1]).rstrip()[-4:])

    def _closed_later(self, end: str, following: str) -> Ids:
        """What is written between the end of a turn's text and the first stop token."""
        rest = following[following.rindex(end) + len(end) :] if end in following else ""
        marks = "|".join(re.escape(self._renderer.decode([token])) for token in self._stops)
        if (mark := re.search(marks, rest)) is None:
            raise RenderError("apply_chat_template writes no token that ends the turn")
        return self._encode(rest[: mark.end()])

    def _missing(self, place: int, turn: Ids) -> list[str]:
        """What should be in a turn, and is not."""
        message, text = self._messages[place], _composed(self._renderer.decode(turn))
        parts = [message.content] if message.content else []
        if self._renderer.template.probe_call is not None:
            parts += [str(call.arguments["expression"]) for call in message.tool_calls[:1]]
        return [part for part in map(_composed, parts) if part not in text]

    def _apart(self, place: int, stop: int, turn: Ids) -> str:
        """What of the turn the template writes elsewhere than in the turn."""
        whole = _composed(self._whole(stop, open_turn=True))
        content, answer = (_composed(m.content) for m in self._messages[place : place + 2])
        if content and -1 < whole.rfind(answer) < whole.rfind(content):
            return content
        return next((part for part in self._missing(place, turn) if part in whole), "")

    def _explained(self, ours: Ids, theirs: Ids) -> str:
        """Why the past differs."""
        renderer, place = self._renderer, _shared(ours, theirs)
        texts = [renderer.decode(ids) for ids in (ours, theirs)]
        if texts[0] == texts[1]:
            joined = renderer.decode(theirs[place : place + 1])
            return f"the header's end and the turn's beginning become one token {joined!r}"
        marks = [sum(text.count(mark) for mark in (REASONING, *_MARKS)) for text in texts]
        if marks[0] > marks[1]:
            return "the reasoning of past turns, or its marks, are left out"
        if place in self._ends and theirs[place] in self._tokenizer.added_tokens_decoder:
            ends = [renderer.decode([ids[place]]) for ids in (ours, theirs)]
            return f"the sampled {ends[0]} becomes {ends[1]} in past turns"
        return self._parting(ours, theirs)

    def _parting(self, ours: Ids, theirs: Ids) -> str:
        place = _shared(ours, theirs)
        before, mine, yours = (
            self._renderer.decode(ids)
            for ids in (ours[max(0, place - 4) : place], ours[place:], theirs[place:])
        )
        return f"after {before!r}, {mine[:24]!r} becomes {yours[:24]!r}"

    def _whole(self, num_messages: int, *, open_turn: bool) -> str:
        dicts = self._renderer.template.dicts(self._messages[:num_messages])
        try:
            text: str = self._tokenizer.apply_chat_template(
                dicts,
                tools=[tool.as_schema() for tool in self._tools] or None,
                add_generation_prompt=open_turn,
                tokenize=False,
            )
        except Exception as error:
            raise RenderError(f"apply_chat_template: {type(error).__name__}: {error}") from error
        return text

    def _encode(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _next_turn(self, start: int) -> int:
        """Index of the model's next turn, or the number of messages."""
        messages = self._messages
        turns = (i for i in range(start, len(messages)) if messages[i].role == "assistant")
        return next(turns, len(messages))


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _starts(prompt: str, header: str, closed: str) -> list[int]:
    """Where the turn may begin in `closed`, which does not begin with `prompt`; latest first."""
    pieces = [piece for piece in re.split(r"(?=<)|(?<=>)", header) if piece]
    heads = ("".join(pieces[:n]) for n in range(len(pieces), 0, -1))
    starts = [closed.rindex(head) + len(head) for head in heads if head in closed][:1]
    shared = _shared(prompt, closed)
    mark = closed.rfind("<", 0, shared)
    starts.append(mark if mark >= 0 and ">" not in closed[mark:shared] else shared)
    return sorted(starts, reverse=True)


def _shared(left: Sequence[object], right: Sequence[object]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
