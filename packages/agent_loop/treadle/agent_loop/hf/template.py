"""A tokenizer's chat template: conversations as text, and what it writes after a sampled turn.

Invariant: `after_turn` returns what the template writes after an assistant's turn, beginning with
the token that ends the turn, whatever the turn contains. It renders a synthetic conversation (a
question, and a turn that contains a marker) followed by the new messages, and cuts at the end of
that turn. For answers to tool calls the synthetic turn makes these calls, because templates look
there for names, ids and the number of results. So the cost does not grow with the conversation,
except for templates that number its results.

The constructor renders probes to find what a template does not declare: which token ends a turn,
whether the next header does that, and in which form it expects contents, arguments and ids. A turn
must end with an added token of the tokenizer, because only then can the text after it be tokenised
alone. Nothing waits; nothing here handles token ids.
"""

import hashlib
import itertools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from treadle.agent_loop.errors import RenderError, SetupError, boundary
from treadle.agent_loop.hf.chat_text import ChatText, is_plain
from treadle.agent_loop.types import Message, ToolCall, ToolSpec

# As many sets of tools are remembered: those of a run, whose rows may select some of them.
_MAX_SETS: Final = 8
# Those of agents may be as long as a request, and are new with each.
_MAX_CHARACTERS: Final = 1 << 18
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_MARKER = "treadle-boundary"
_ANSWER = "treadle-answer"
_SYSTEM = Message(role="system", content="instructions")
_QUESTION = Message(role="user", content="question")
_TURN = Message(role="assistant", content=_MARKER)
_USER_ANSWER = Message(role="user", content=_ANSWER)
_RESULT = Message(role="tool", content=_ANSWER, tool_call_id="call_0", name="probe")
PROBE_TOOL = ToolSpec(
    name="probe",
    description="Answers.",
    parameters={
        "type": "object",
        "properties": {"text": {"type": "string", "description": "Any."}},
        "required": ["text"],
    },
)
PROBE_CALL = ToolCall(id="call_0", name="probe", arguments={"text": _MARKER})


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """The form in which a template accepts messages. Texts are passed unchanged.

    Attributes:
        parts: Contents are lists of parts, as in templates of vision models.
        arguments_as_text: A call's arguments are a JSON string, not an object.
        nine_character_ids: Ids of calls have nine letters and digits (Mistral); others are hashed.
    """

    parts: bool = False
    arguments_as_text: bool = False
    nine_character_ids: bool = False

    def as_dict(self, message: Message) -> dict[str, object]:
        """Returns a message as `apply_chat_template` takes it."""
        content: object = message.content
        if message.images or self.parts:
            content = [
                {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
                for part in message.parts or ("",)
            ]
        entry: dict[str, object] = {"role": message.role, "content": content}
        if message.tool_calls:
            entry["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = self._id(message.tool_call_id)
        if message.name is not None:
            entry["name"] = message.name
        if message.reasoning is not None:
            entry["reasoning_content"] = message.reasoning
        return entry

    def _call(self, call: ToolCall) -> dict[str, object]:
        arguments: object = dict(call.arguments)
        if self.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._id(call.id),
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }

    def _id(self, call_id: str) -> str:
        if not self.nine_character_ids or _NINE.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """How a template ends an assistant's turn that is not the last message.

    Attributes:
        token: The added token that ends the turn. If turns have no end token (GLM), it is the
            first token of the next header.
        skipped: Number of added tokens between the turn's text and `token`; the model samples
            them.
        stop: The token that the model samples to end the turn. It differs from `token` if the
            template writes another one for the last turn and replaces it later (gpt-oss:
            <|return|>, then <|end|>).
    """

    token: str
    skipped: int
    stop: str


class AddedTokens:
    """The added tokens of a tokenizer, as strings.

    Args:
        tokens: The strings, at which the tokenizer splits.
        eos: The end-of-sequence token, None if there is none.
    """

    def __init__(self, tokens: Iterable[str], *, eos: str | None) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._eos = eos

    def any_in(self, text: str) -> bool:
        """Returns whether the text contains an added token."""
        return self._pattern.search(text) is not None

    def from_first(self, text: str) -> str:
        """Returns a text from its first added token on; "" if it has none."""
        found = self._pattern.search(text)
        return "" if found is None else text[found.start() :]

    def cut(self, text: str, end: TurnEnd) -> tuple[str, str] | None:
        """Splits the text after a turn at the turn's end; returns None if there is no end."""
        match = next(itertools.islice(self._pattern.finditer(text), end.skipped, None), None)
        if match is None or match[0] != end.token:
            return None
        return text[: match.start()], text[match.start() :]

    def find_end(self, closed: str, followed: str, *, implied: bool) -> TurnEnd | None:
        """Finds the added token that ends a turn.

        It is the first of these that exists: the end-of-sequence token; the last token that is
        written in both cases; the first token that is written only if a message follows.

        Args:
            closed: The text after the turn if the turn is the last message.
            followed: The text between the turn and an answer.
            implied: Turns have no end token, so text that is written in both cases still belongs
                to the turn, if any text comes after it.

        Returns:
            The end, or None if there is no added token.
        """
        mine, theirs = list(self._pieces(closed)), list(self._pieces(followed))
        shared = _shared(mine, theirs)
        places = [place for place, piece in enumerate(theirs) if self._is_token(piece)]
        inside = [place for place in places if place < shared][-1:]
        outside = [place for place in places if place >= shared][:1]
        eos = [place for place in places if theirs[place] == self._eos][:1]
        candidates = eos + (outside + inside if implied else inside + outside)
        if not candidates:
            return None
        token = theirs[candidates[0]]
        own = [piece for piece in mine if self._is_token(piece)]
        replaced = own and not implied and token not in own
        return TurnEnd(
            token=token,
            skipped=places.index(candidates[0]),
            stop=own[-1] if replaced else token,
        )

    def _is_token(self, piece: str) -> bool:
        return self._pattern.fullmatch(piece) is not None

    def _pieces(self, text: str) -> Iterator[str]:
        """Yields the added tokens of a text and the strings between them."""
        place = 0
        for match in self._pattern.finditer(text):
            if match.start() > place:
                yield text[place : match.start()]
            yield match[0]
            place = match.end()
        if place < len(text):
            yield text[place:]


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTurn:
    """The text that follows a turn.

    Attributes:
        closing: Text of the template between the turn's text and its end; in a turn with calls only
            the white space, because the text before belongs to the synthetic call.
        text: The end of the turn, the messages, and the next header.
        ends: If the model sampled one of these tokens, it replaces the end at the start of `text`.
    """

    closing: str
    text: str
    ends: frozenset[str]


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: A tokenizer with a chat template.
        kwargs: Passed to the template, for example `enable_thinking`.

    Attributes:
        form: The form in which the template accepts messages.
        stops: The tokens that end a turn, as strings, without duplicates.
        probe_call: How the template writes a turn with `PROBE_CALL`. None if it writes no calls,
            because it expects them in the content or has no tools.
        tool_problem: Why tool results cannot be shown to the model; None if they can.
        shows_tools: Whether a prompt with tools differs from one without.
        plain_closing: Text of the template between the text of a turn without calls and its end.
        headers: Text of the template between a message and the assistant's turn, from the first
            added token on.
        opened: How the template begins a turn without calls, from the header on.

    Raises:
        SetupError: There is no template, it does not use one of `kwargs`, it cannot render a
            plain chat, or its turns do not end with an added token.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, object]) -> None:
        if not tokenizer.chat_template:
            raise SetupError("the tokenizer has no chat template: add chat_template.jinja")
        for name in kwargs:
            if re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)) is None:
                raise SetupError(f"the chat template does not use {name!r}, a template_kwarg")
        self._chat_text = ChatText(tokenizer, kwargs)
        self._shown: list[_ShownTools] = []
        self._added = AddedTokens(
            (token.content for token in tokenizer.added_tokens_decoder.values()),
            eos=tokenizer.eos_token,
        )
        self.form = MessageForm()
        self.probe_call: str | None = None
        self.tool_problem: str | None = None
        self._calls_are_written = True
        self._parallel = self._counts_results = False
        self.headers: tuple[str, ...] = ()
        self.opened = self.plain_closing = ""
        self._plain_end, implied = self._probe_plain()
        self._tool_end = self._probe_tools(implied=implied)
        self.shows_tools = self._shows_tools()
        self._reasoned = self._end_of_reasoning()
        ends = (self._plain_end, self._tool_end)
        self.stops = tuple(dict.fromkeys(end.stop for end in ends if end is not None))

    def dicts(self, messages: Iterable[Message]) -> list[dict[str, object]]:
        """Returns the messages as `apply_chat_template` takes them."""
        return [self.form.as_dict(message) for message in messages]

    def text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, open_turn: bool
    ) -> str:
        """Returns a conversation.

        Args:
            messages: In the order of execution.
            open_turn: Whether to end with the header of the assistant's next turn.

        Raises:
            RenderError: The template refuses these messages.
        """
        with boundary(RenderError, "chat template"):
            shown = self._shown_tools(tools)
            return self._chat_text.render(
                self.dicts(messages), shown.schemas, open_turn=open_turn, plain_tools=shown.plain
            )

    def after_turn(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        history: Sequence[Message] = (),
    ) -> AfterTurn:
        """Returns the text that follows an assistant's turn.

        Args:
            messages: The answers to the turn; results of its calls come first.
            tools: The tools of the conversation.
            history: The conversation including the turn.

        Raises:
            RenderError: The template refuses these messages, cannot show tool results, or ends
                the turn before them differently than it ends other turns.
        """
        end, turn, answers = self._plain_end, _TURN, tuple(messages)
        if messages[0].role == "tool":
            if self._tool_end is None:
                raise RenderError(f"the chat template shows no results: {self.tool_problem}")
            end, (turn, answers) = self._tool_end, self._calling_turn(messages)
        before = self._before_turn(history)
        _refuse_marker(before, self._shown_tools(tools))
        whole = self.text((*before, turn, *answers), tools, open_turn=True)
        after = _after_marker(whole, turn)
        cut = self._added.cut(after, end)
        if cut is None:
            raise RenderError(
                f"the template ends a turn with {end.token!r}, but writes {after[:80]!r} if "
                f"{[m.role for m in messages]} follow: the conversation cannot be extended exactly"
            )
        closing, text = cut
        if end is self._tool_end:
            closing = closing[len(closing.rstrip()) :]
        return AfterTurn(closing=closing, text=text, ends=frozenset((end.token, end.stop)))

    def as_closed(self, mark: str) -> str:
        """Returns a mark that closes an element as the template writes it: with its white space."""
        for text in (self._reasoned, self.probe_call or ""):
            after = r"\s*" if text is self._reasoned else ""
            if found := re.search(rf"\s*{re.escape(mark)}{after}", text):
                return found[0]
        return mark

    def _shown_tools(self, tools: Sequence[ToolSpec]) -> "_ShownTools":
        """Returns what depends on the tools only; of the latest short sets it is kept."""
        for place, shown in enumerate(self._shown):
            if shown.is_of(tools):
                if place:
                    self._shown = [shown, *(each for each in self._shown if each is not shown)]
                return shown
        shown = _ShownTools(tuple(tools))
        # The latest one in any case, for the other texts of its request.
        self._shown = [shown, *(each for each in self._shown[: _MAX_SETS - 1] if each.is_short)]
        return shown

    def _before_turn(self, history: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages before the synthetic turn: as few as the template allows."""
        if self._counts_results and history:
            return tuple(
                m if m.role == "system" else replace(m, content="", images=()) for m in history[:-1]
            )
        system = (m for m in history[:1] if m.role == "system")
        return (*system, _QUESTION)

    def _calling_turn(self, messages: Sequence[Message]) -> tuple[Message, tuple[Message, ...]]:
        """Returns a turn with the calls that the messages answer, and the messages with its ids."""
        results = tuple(itertools.takewhile(lambda m: m.role == "tool", messages))
        named = tuple(
            m
            if m.tool_call_id and m.name
            else replace(m, tool_call_id=m.tool_call_id or f"call_{i}", name=m.name or "unknown")
            for i, m in enumerate(results)
        )
        arguments = PROBE_CALL.arguments if self._calls_are_written else {}
        calls = tuple(
            ToolCall(id=m.tool_call_id or "", name=m.name or "", arguments=arguments)
            for m in (named if self._parallel else named[:1])
        )
        content = "" if self._calls_are_written else _MARKER
        turn = Message(role="assistant", content=content, tool_calls=calls)
        return turn, (*named, *messages[len(results) :])

    def _probe_plain(self) -> tuple[TurnEnd, bool]:
        """Returns the end of a turn without calls, and whether it is just the next header."""
        problem: RenderError | None = None
        for parts, tools in itertools.product((False, True), ((), (PROBE_TOOL,))):
            self.form = MessageForm(parts=parts)
            try:
                closed, followed = self._probe(_TURN, (_USER_ANSWER,), tools)
            except RenderError as error:
                problem = problem or error
                continue
            end = self._added.find_end(closed, followed, implied=False)
            if end is None:
                raise SetupError(
                    f"the chat template ends an assistant's turn with {followed[:40]!r}, which has "
                    "no special token before the next message: turns cannot be extended exactly"
                )
            written = self.text((_QUESTION, _TURN), tools, open_turn=False)
            self.opened = written.partition(_MARKER)[0].rpartition(_QUESTION.content)[2]
            cut = self._added.cut(followed, end)
            self.plain_closing = "" if cut is None else cut[0]
            return end, not self._added.any_in(closed)
        raise SetupError(f"the chat template cannot render a plain chat: {problem}") from problem

    def _shows_tools(self) -> bool:
        same = False
        for chat in ([_QUESTION], [_SYSTEM, _QUESTION]):
            try:
                plain, shown = (
                    self.text(chat, tools, open_turn=True) for tools in ((), (PROBE_TOOL,))
                )
            except RenderError:
                continue  # some templates refuse a chat without tools, or with a system message
            if plain != shown:
                return True
            same = True
        return not same

    def _probe_tools(self, *, implied: bool) -> TurnEnd | None:
        """Returns the end of a turn with calls; sets `tool_problem` and returns None if none."""
        plain = self.form
        for written, text, nine in itertools.product((True, False), *[(False, True)] * 2):
            self._calls_are_written = written
            self.form = replace(plain, arguments_as_text=text, nine_character_ids=nine)
            turn, answers = self._calling_turn((_RESULT,))
            try:
                closed, followed = self._probe(turn, answers, (PROBE_TOOL,))
            except RenderError as error:
                self.tool_problem = self.tool_problem or str(error)
                continue
            end = self._added.find_end(closed, followed, implied=implied)
            if end is not None:
                self.tool_problem = None
                self._parallel = self._writes_several()
                self._counts_results = self._counts()
                self.probe_call = self._written_call(turn, closed, end) if written else None
                return end
            self.tool_problem = f"no special token is between a call and its result: {followed!r}"
        self.form = plain
        return None

    def _probe(
        self, turn: Message, answers: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[str, str]:
        """Returns the text after the turn if the turn is last, and the text before an answer."""
        chat = (_QUESTION, turn)
        closed = _after_marker(self.text(chat, tools, open_turn=False), turn)
        whole = self.text((*chat, *answers), tools, open_turn=True)
        followed, answer, header = _after_marker(whole, turn).partition(_ANSWER)
        if not answer:
            raise RenderError(f"it leaves out a message of role {answers[0].role!r}")
        header = self._added.from_first(header.rpartition(_ANSWER)[2])
        if header and header not in self.headers:
            self.headers = (*self.headers, header)
        return closed, followed

    def _end_of_reasoning(self) -> str:
        """Returns what the template writes after reasoning; "" if it leaves reasoning out."""
        turn = Message(role="assistant", content="", reasoning=_MARKER)
        try:
            return _after_marker(self.text((_QUESTION, turn), (), open_turn=False), turn)
        except RenderError:
            return ""

    def _writes_several(self) -> bool:
        """Returns whether the template writes several calls of one turn, each with its result."""
        self._parallel = True
        turn, answers = self._calling_turn((_RESULT, replace(_RESULT, tool_call_id="call_1")))
        try:
            self._probe(turn, answers, (PROBE_TOOL,))
        except RenderError:
            return False
        return True

    def _counts(self) -> bool:
        """Returns whether a result is written differently after an earlier round of calls.

        Cohere's templates number the results of a conversation.
        """
        (first, result), (second, answer) = (
            self._calling_turn((replace(_RESULT, tool_call_id=name),))
            for name in ("call_a", "call_b")
        )
        for before in ((_QUESTION,), (_SYSTEM, _QUESTION)):
            try:
                once, twice = (
                    self.text((*before, *middle, second, *answer), (PROBE_TOOL,), open_turn=True)
                    for middle in ((), (first, *result))
                )
            except RenderError:  # the template accepts no system message
                continue
            if once.rpartition(_MARKER)[2] != twice.rpartition(_MARKER)[2]:
                return True
        return False

    def _written_call(self, turn: Message, closed: str, end: TurnEnd) -> str:
        """Returns the text of the turn, from after its header to its end."""
        prompt = self.text((_QUESTION,), (PROBE_TOOL,), open_turn=True)
        whole = self.text((_QUESTION, turn), (PROBE_TOOL,), open_turn=False)
        pairs = enumerate(zip(prompt, whole, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), len(prompt))
        mark = whole.rfind("<", 0, start)
        if mark >= 0 and ">" not in whole[mark:start]:
            start = mark  # The prompt opens the reasoning: <think> begins like <tool_call>.
        cut = self._added.cut(closed, replace(end, token=end.stop))
        stop = len(whole) - len(closed) + len(closed if cut is None else cut[0])
        return whole[start:stop]


class _ShownTools:
    """A set of tools as a template shows it.

    Attributes:
        schemas: Their schemas; None if there are none.
        plain: Whether the schemas are plain data.
    """

    def __init__(self, specs: tuple[ToolSpec, ...]) -> None:
        self.specs = specs
        self.schemas = [spec.as_schema() for spec in specs] or None
        self.plain = is_plain(self.schemas)

    def is_of(self, tools: Sequence[ToolSpec]) -> bool:
        """Returns whether it is of these very tools: equal ones may have a schema in other words.

        `True` equals 1, and dictionaries are equal in any order.
        """
        return len(tools) == len(self.specs) and all(map(operator.is_, tools, self.specs))

    @cached_property
    def is_short(self) -> bool:
        """Whether it is short enough to be kept; what is no plain data is a run's own, and is."""
        return not self.plain or len(json.dumps(self.schemas)) <= _MAX_CHARACTERS

    @cached_property
    def marked(self) -> bool:
        """Whether a schema contains the marker."""
        return _MARKER in json.dumps(self.schemas, default=str)


def _refuse_marker(messages: Sequence[Message], tools: _ShownTools) -> None:
    if any(_MARKER in message.content for message in messages):
        raise RenderError(f"a system message contains the reserved text {_MARKER!r}: reword it")
    if tools.marked:
        raise RenderError(f"a tool's schema contains the reserved text {_MARKER!r}: reword it")


def _after_marker(text: str, turn: Message) -> str:
    """Returns the text after the synthetic turn; messages after it may contain the marker too."""
    markers = max(1, sum(bool(call.arguments) for call in turn.tool_calls))
    pieces = text.split(_MARKER, markers)
    if len(pieces) <= markers:
        raise RenderError("it leaves out the assistant's text or calls")
    return pieces[-1]


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    """Returns the length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
