"""The branch: one line of messages in a captured session, with its ledger.

Invariant: ledger and messages grow together, by whole turns, and only in `write`, which waits for
nothing; so a failed completion leaves no trace. A branch's messages end with a sampled turn. The
ids of a fork are the ids that it shares with another branch, then what the template writes for the
other messages. All of them are the fork's prompt, so the loss mask is False there, and each
sampled token is trained only in the branch that sampled it.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from treadle.agent_loop.capture.history import ReturnedTurn, shared_history, with_own_ids
from treadle.agent_loop.capture.template_fit import TemplateFit
from treadle.agent_loop.errors import RenderError, boundary
from treadle.agent_loop.tokens.renderer import ChatRenderer, PlacedImage, Rendering
from treadle.agent_loop.tokens.transcript import Transcript
from treadle.agent_loop.types import Completion, FinishReason, Message, ToolSpec


class Continuation(enum.StrEnum):
    """How a request relates to the recorded branches of its session."""

    ROOT = "root"
    """Begins differently from every branch: another system prompt, other tools, a sub-agent."""
    EXACT = "exact"
    """Has the whole history of a branch, as it was returned, and extends it."""
    REALIGNED = "realigned"
    """Like EXACT except for harmless rewrites (`history`); the sampled ids are kept."""
    FORK = "fork"
    """Shares a part of a branch: an edited, shortened or repeated history, or a branch that
    another request extends at the same time."""
    CHOICE = "choice"
    """Another answer to the request of a turn, where the agent asks for several (`n`)."""


class Branch:
    """One line of messages.

    Args:
        prompt: Ids up to the first completion; at least one.
        messages: The messages of these ids.
        turns: The sampled turns among the messages, from other branches.

    Attributes:
        transcript: The ledger; becomes one sample.
        turns: The sampled turns among the messages.
        by_ids: Whether its requests came as ids; then the messages are only their text.
        busy: Whether a request is extending the branch.
        last_request: Number of the latest completion's request; negative if there is none.
        finish: Why the latest completion ended.
    """

    def __init__(
        self,
        prompt: Rendering,
        messages: Sequence[Message],
        tools: tuple[ToolSpec, ...],
        *,
        turns: Sequence[ReturnedTurn] = (),
        by_ids: bool = False,
    ) -> None:
        self.transcript = Transcript(prompt.ids, images=prompt.images)
        self.messages = list(messages)
        self.tools = tools
        self.turns = list(turns)
        self.by_ids = by_ids
        self.busy = False
        self.last_request = -1
        self.finish = FinishReason.STOP

    @property
    def written_messages(self) -> tuple[Message, ...]:
        """The messages as in their ids: with the stop strings that were cut off, and own ids."""
        messages = list(with_own_ids(self.messages, self.turns))
        for turn in self.turns:
            if turn.uncut is not None:
                messages[turn.index] = replace(messages[turn.index], content=turn.uncut)
        return tuple(messages)

    def write(
        self,
        observed: Rendering,
        messages: Sequence[Message],
        completion: Completion,
        returned: Message,
        *,
        uncut: str | None,
        call_ids: tuple[str, ...],
        request: int,
        trained: bool = True,
        turns: Sequence[ReturnedTurn] = (),
    ) -> None:
        """Writes a turn: the tokens observed since the last turn, and the completion.

        Args:
            observed: The ids since the last turn, with their images.
            completion: The turn, as it was sampled.
            returned: The turn, as the agent was answered.
            uncut: Its text with the stop string that was cut off; None: nothing was.
            call_ids: The ids of its calls as the model wrote them.
            request: Number of the request that it answers.
            trained: Whether its ids are under the loss; else they are observed.
            turns: The turns before it as the request sent them back; empty for a new branch.
        """
        self.turns = list(turns) or self.turns
        self.transcript.observe(observed.ids, images=observed.images)
        self.messages.extend(messages)
        start = len(self.transcript)
        if trained:
            self.transcript.sample(completion)
        else:
            self.transcript.observe(completion.token_ids)
        self.turns.append(
            ReturnedTurn(
                index=len(self.messages),
                start=start,
                stop=len(self.transcript),
                uncut=uncut,
                call_ids=call_ids,
            )
        )
        self.messages.append(returned)
        self.last_request = request
        self.finish = completion.finish


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPlan:
    """The prompt of a request, and the branch that its completion is written to.

    Attributes:
        how: How the request relates to the recorded branches.
        branch: The branch to write to; a new one for ROOT and FORK.
        observed: The ids to append to the branch before sampling.
        messages: The messages of these ids.
        is_answer: Whether the request answers an earlier completion of the session.
        why: For a FORK: why the request does not extend the branch.
        fitted: Whether the messages are written in another form than the agent's (`template_fit`).
        turns: The branch's turns as the request sent them back; empty for a new branch.
    """

    how: Continuation
    branch: Branch
    observed: Rendering
    messages: tuple[Message, ...]
    is_answer: bool
    why: str | None = None
    fitted: bool = False
    turns: tuple[ReturnedTurn, ...] = ()

    @property
    def prompt(self) -> tuple[int, ...]:
        """[P] ids to sample from."""
        return (*self.branch.transcript.ids, *self.observed.ids)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images of the prompt."""
        return _joined(self.branch.transcript.images, len(self.branch.transcript), self.observed)

    def sibling(self) -> "BranchPlan":
        """Returns the plan of another answer to this request; before this one is written."""
        branch = Branch(
            Rendering(ids=self.prompt, images=self.images),
            (*self.branch.messages, *self.messages),
            self.branch.tools,
            turns=self.branch.turns,
            by_ids=self.branch.by_ids,
        )
        return _fresh(Continuation.CHOICE, branch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """A point in a branch from which a request can continue.

    Attributes:
        covered: Number of the branch's messages up to this point.
        stop: Number of the branch's ids up to this point.
        num_shared: Number of leading messages that branch and request share.
        num_rewritten: Number of these that the request has rewritten.
    """

    branch: Branch
    covered: int
    stop: int
    num_shared: int
    num_rewritten: int

    @property
    def whole(self) -> bool:
        """Whether the point is the end of the branch, and no request is extending the branch."""
        return self.covered == len(self.branch.messages) and not self.branch.busy

    @property
    def rank(self) -> tuple[int, bool, int, int]:
        """The sort key: more shared messages first, then whole, unchanged and recent branches."""
        return (self.covered, self.whole, -self.num_rewritten, self.branch.last_request)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A request whose place is found, and whose new messages are not rendered yet.

    It shares nothing that changes: rendering may take long, and runs in another thread.

    Attributes:
        messages: Messages of the request; the last one is not the assistant's.
        base: The point from which it continues; None if it begins from the start.
        shared: Ids up to that point.
        history: Messages up to that point.
        images: Images up to that point.
        turns: The sampled turns up to that point.
        whole: Whether it extends the base's branch itself.
        why: For a FORK: why the request does not extend the branch.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    base: _Base | None = None
    shared: tuple[int, ...] = ()
    history: tuple[Message, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    turns: tuple[ReturnedTurn, ...] = ()
    whole: bool = False
    why: str | None = None

    @property
    def num_characters(self) -> int:
        """About the number of characters to render."""
        new = self.messages[len(self.history) :]
        return sum(len(repr(tool)) for tool in self.tools) + sum(
            len(message.content) + len(message.reasoning or "") + len(repr(message.tool_calls))
            for message in new
        )

    def render(self, renderer: ChatRenderer, fit: TemplateFit) -> BranchPlan:
        """Renders the request's new messages.

        If the template cannot continue from the shared ids, the whole conversation is rendered
        again, as a FORK.

        Raises:
            RenderError: The template refuses these messages.
            PromptTooLongError: They are longer than the renderer's bound.
        """
        if self.base is None:
            how = Continuation.ROOT if self.why is None else Continuation.FORK
            return self._anew(renderer, fit, how, is_answer=self.why is not None, why=self.why)
        rest = self.messages[self.base.covered :]
        turns = tuple(turn.sent_back(self.messages[turn.index]) for turn in self.turns)
        own = with_own_ids(self.messages, turns)[self.base.covered :]
        fitted = fit.following(own)
        try:
            new = Rendering(ids=())
            if rest:
                history = fit.opening(self.history)
                new = renderer.extend(self.shared, fitted, tools=self.tools, history=history)
        except RenderError as error:
            how, why = Continuation.FORK, str(error)
            return self._anew(renderer, fit, how, is_answer=bool(rest), why=why)
        if self.whole:
            rewritten = self.base.num_rewritten
            return BranchPlan(
                how=Continuation.REALIGNED if rewritten else Continuation.EXACT,
                branch=self.base.branch,
                observed=new,
                messages=rest,
                is_answer=True,
                fitted=fitted != own,
                turns=turns,
            )
        joined = _joined(self.images, len(self.shared), new)
        fork = Branch(
            Rendering(ids=(*self.shared, *new.ids), images=joined),
            (*self.history, *rest),
            self.tools,
            turns=turns,
        )
        plan = _fresh(Continuation.FORK, fork, is_answer=bool(rest), why=self.why)
        return replace(plan, fitted=fitted != own)

    def _anew(
        self,
        renderer: ChatRenderer,
        fit: TemplateFit,
        how: Continuation,
        *,
        is_answer: bool,
        why: str | None,
    ) -> BranchPlan:
        fitted = fit.opening(fit.without_preambles(self.messages))
        rendering = renderer.render(fitted, tools=self.tools)
        branch = Branch(rendering, self.messages, self.tools)
        plan = _fresh(how, branch, is_answer=is_answer, why=why)
        return replace(plan, fitted=fitted != self.messages)


def make_draft(
    branches: Sequence[Branch], messages: tuple[Message, ...], tools: tuple[ToolSpec, ...]
) -> Draft:
    """Finds the branch that a request continues.

    Args:
        branches: The session's branches, in the order of their first completions.
        messages: Messages of the request; the last one is not the assistant's.
    """
    same_tools = [b for b in branches if b.tools == tools and not b.by_ids]
    bases = [base for branch in same_tools for base in _bases(branch, messages)]
    if not bases:
        return Draft(messages=messages, tools=tools, why=_edited_opening(same_tools, messages))
    base = max(bases, key=lambda b: b.rank)
    branch = base.branch
    return Draft(
        messages=messages,
        tools=tools,
        base=base,
        shared=tuple(branch.transcript.ids[: base.stop]),
        history=tuple(branch.messages[: base.covered]),
        images=tuple(image for image in branch.transcript.images if image.stop <= base.stop),
        turns=tuple(turn for turn in branch.turns if turn.stop <= base.stop),
        whole=base.whole,
        why=None if base.whole else _reason(base, messages),
    )


def plan_ids(
    branches: Sequence[Branch], prompt: tuple[int, ...], renderer: ChatRenderer
) -> BranchPlan:
    """Finds the branch that a prompt of ids continues: the longest one that is its prefix.

    Raises:
        RenderError: The renderer cannot decode an id.
    """

    def text(ids: Sequence[int]) -> Message:
        with boundary(RenderError, "token_ids"):
            return Message(role="user", content=renderer.decode(ids))

    ours = [branch for branch in branches if branch.by_ids]
    whole = [
        branch
        for branch in ours
        if not branch.busy and prompt[: len(branch.transcript)] == tuple(branch.transcript.ids)
    ]
    if whole:
        branch = max(whole, key=lambda branch: len(branch.transcript))
        rest = prompt[len(branch.transcript) :]
        return BranchPlan(
            how=Continuation.EXACT,
            branch=branch,
            observed=Rendering(ids=rest),
            messages=(text(rest),) if rest else (),
            is_answer=True,
        )
    fresh = Branch(Rendering(ids=prompt), (text(prompt),), (), by_ids=True)
    shared = [_num_shared(branch.transcript.ids, prompt) for branch in ours]
    forks = any(at > b.turns[0].start for at, b in zip(shared, ours, strict=True))
    if not forks:
        return _fresh(Continuation.ROOT, fresh)
    why = f"it shares the first {max(shared)} of its {len(prompt)} ids with another request"
    return _fresh(Continuation.FORK, fresh, is_answer=True, why=why)


def _num_shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def _bases(branch: Branch, messages: Sequence[Message]) -> list[_Base]:
    """Returns the end of each shared turn, or its start if the request ends there."""
    shared = shared_history(branch.messages, branch.turns, messages)
    bases = []
    for turn in branch.turns:
        if turn.index < shared.num_messages:
            covered, stop = turn.index + 1, turn.stop
        elif turn.index == shared.num_messages == len(messages):
            covered, stop = turn.index, turn.start
        else:
            break
        bases.append(
            _Base(
                branch=branch,
                covered=covered,
                stop=stop,
                num_shared=shared.num_messages,
                num_rewritten=shared.num_rewritten,
            )
        )
    return bases


def _reason(base: _Base, messages: Sequence[Message]) -> str:
    """Returns why a request does not simply extend the branch with which it shares most."""
    recorded = base.branch.messages
    if base.covered == len(recorded):
        return "another request extends the same branch at the same time"
    if base.covered == len(messages):
        return f"its {len(messages)} messages were answered before: it was sent again"
    if base.num_shared == len(messages):
        return f"it has only the first {len(messages)} of {len(recorded)} messages"
    return _edit(recorded, messages, base.num_shared)


def _edited_opening(branches: Sequence[Branch], messages: Sequence[Message]) -> str | None:
    """Describes the edit if a request begins like a branch but has another first answer.

    Then no turn is shared, and so no ids except those that the template writes again.
    """
    for branch in reversed(branches):
        place = shared_history(branch.messages, branch.turns, messages).num_messages
        if place == branch.turns[0].index < len(messages):
            return _edit(branch.messages, messages, place)
    return None


def _edit(recorded: Sequence[Message], messages: Sequence[Message], place: int) -> str:
    was, now = _brief(recorded[place]), _brief(messages[place])
    if was == now:
        names = (field.name for field in fields(Message))
        values = ((n, getattr(recorded[place], n), getattr(messages[place], n)) for n in names)
        name, before, after = next(each for each in values if each[1] != each[2])
        was, now = f"{was} with the {name} {before!r:.160}", f"{after!r:.160}"
    return f"message {place + 1} of {len(recorded)}, {was}, has become {now}"


def _brief(message: Message) -> str:
    calls = f" with {len(message.tool_calls)} calls" if message.tool_calls else ""
    return f"{message.role} {message.content[:80]!r}{calls}"


def _fresh(
    how: Continuation, branch: Branch, *, is_answer: bool = False, why: str | None = None
) -> BranchPlan:
    return BranchPlan(
        how=how,
        branch=branch,
        observed=Rendering(ids=()),
        messages=(),
        is_answer=is_answer,
        why=why,
    )


def _joined(
    images: Sequence[PlacedImage], length: int, after: Rendering
) -> tuple[PlacedImage, ...]:
    return (*images, *(image.shifted(length) for image in after.images))
