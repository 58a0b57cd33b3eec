"""Prompts: rows that are ready to run, with everything about them decided at start.

Invariant: a `Prompt` names a loop that exists, its messages are those the loop receives, and its
rendered length, including tool schemas, is within the limit. An invalid row is an error before the
first step; an overlong one is dropped or shortened, and counted, if the configuration allows it.
Rendering a large dataset takes a while; the caller chooses the thread.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from treadle.agent_loop import (
    AgentTask,
    ChatRenderer,
    Message,
    RenderError,
    Tool,
    derive_seed,
)
from treadle.tools.rewards.user import OF_MESSAGES
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.images import row_messages
from treadle.trainer.data.row import Row
from treadle.trainer.data.rows_in_files import RowsInFiles
from treadle.trainer.data.rules import PromptRules, check_rows
from treadle.trainer.data.shorten import shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row, ready to run; `num_tokens` is the length of its rendered prompt."""

    row: Row
    split: str
    loop: str
    messages: tuple[Message, ...]
    num_tokens: int

    def tasks(self, *, samples: int, seed: int, step: int) -> tuple[AgentTask, ...]:
        """Returns the group of `samples` tasks of this row in step `step`.

        Each task has its own seed, which depends only on the arguments, the split and the row, so
        that a resumed run samples what an uninterrupted one would.
        """
        return tuple(
            AgentTask(
                task_id=f"{self.split}/{self.row.index}",
                sample_index=self.row.index,
                rollout_index=rollout_index,
                loop=self.loop,
                messages=self.messages,
                fields={k: v for k, v in self.row.columns.items() if k not in OF_MESSAGES},
                seed=derive_seed(seed, self.split, step, self.row.index, rollout_index),
            )
            for rollout_index in range(samples)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of a split.

    Attributes:
        prompts: In the order of the rows; at least one.
        num_dropped: Number of rows dropped because their prompt is too long.
        loops: Names of the loops that run them.
        has_images: Whether a prompt shows an image.
        notes: Lines to print at start: the number of dropped or shortened rows, and settings in
            rows that nothing reads.
    """

    prompts: Sequence[Prompt]
    num_dropped: int
    loops: frozenset[str]
    has_images: bool
    notes: tuple[str, ...]


def make_prompts(
    rows: Sequence[Row],
    *,
    split: str,
    rules: PromptRules,
    renderer: ChatRenderer,
) -> PromptSet:
    """Decides the loop and messages of every row, and checks its length.

    Args:
        split: Names the rows in task ids and messages: "train" or "val".

    Raises:
        DataError: `check_rows` rejects a row; the template rejects a prompt; a prompt is too long
            and `rules.overlong` is "error"; or every prompt was dropped.
    """
    check_rows(rows, split=split, rules=rules)
    made: list[Prompt] | PromptsInFiles = []
    if isinstance(rows, RowsInFiles):
        made = PromptsInFiles(rows, split=split, rules=rules, renderer=renderer)
    overlong: list[tuple[str, int]] = []
    loops: set[str] = set()
    has_images = False
    for row in rows:
        prompt, length = _prepare(row, split, rules, renderer)
        if length > rules.max_prompt_tokens:
            overlong.append((row.place, length))
        if prompt is not None:
            made.append(prompt)
            loops.add(prompt.loop)
            has_images |= any(message.images for message in prompt.messages)
    prompts = made if isinstance(made, PromptsInFiles) else tuple(made)
    notes = [
        *_overlong_notes(overlong, split, len(rows), rules),
        *_unused_kwargs(rows, split, rules.tools),
    ]
    if not prompts:
        raise DataError(f"no {split} row is left: {'; '.join(notes)}")
    dropped = len(rows) - len(prompts)
    return PromptSet(
        prompts=prompts,
        num_dropped=dropped,
        loops=frozenset(loops),
        has_images=has_images,
        notes=tuple(notes),
    )


class PromptsInFiles(Sequence[Prompt]):
    """The prompts of rows that stay in their files: 16 bytes each, made when they are accessed.

    Args:
        split: See `make_prompts`, also for the next two.
        renderer: Renders again what has to be shortened again.
    """

    def __init__(
        self, rows: RowsInFiles, *, split: str, rules: PromptRules, renderer: ChatRenderer
    ) -> None:
        self._rows, self._split = rows, split
        self._rules, self._renderer = rules, renderer
        self._kept, self._num_tokens = array("Q"), array("Q")
        self._shortened: set[int] = set()

    def append(self, prompt: Prompt) -> None:
        """Keeps where a prompt comes from, which is made of the row after the last one."""
        self._kept.append(prompt.row.index)
        self._num_tokens.append(prompt.num_tokens)
        if prompt.messages != row_messages(prompt.row):
            self._shortened.add(prompt.row.index)

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        """Makes one prompt, or several.

        Raises:
            DataError: Its file has changed.
        """
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return self._make(self._rows[self._kept[index]], self._num_tokens[index])

    def __iter__(self) -> Iterator[Prompt]:
        """Yields the prompts in the order of the rows, which is faster than by their index."""
        kept = iter(zip(self._kept, self._num_tokens, strict=True))
        wanted = next(kept, None)
        for row in self._rows:
            if wanted is not None and row.index == wanted[0]:
                yield self._make(row, wanted[1])
                wanted = next(kept, None)

    def _make(self, row: Row, num_tokens: int) -> Prompt:
        if row.index in self._shortened:
            prompt, _ = _prepare(row, self._split, self._rules, self._renderer)
            assert prompt is not None, "it was made of the same row"
            return prompt
        return Prompt(
            row=row,
            split=self._split,
            loop=self._rules.loop_of(row),
            messages=row_messages(row),
            num_tokens=num_tokens,
        )


def _prepare(
    row: Row, split: str, rules: PromptRules, renderer: ChatRenderer
) -> tuple[Prompt | None, int]:
    """Returns the prompt of a row, None if it is too long, and how long the row's messages are."""
    messages = row_messages(row)
    specs = tuple(tool.spec for tool in rules.tools_of(row).values())

    def count(prompt: Sequence[Message]) -> int:
        return len(renderer.render(prompt, tools=specs).ids)

    try:
        length = num_tokens = count(messages)
        if num_tokens > rules.max_prompt_tokens:
            if rules.overlong == "error" or rules.overlong == "drop":
                return None, length
            limit = rules.max_prompt_tokens
            if any(message.images for message in messages):
                raise DataError(
                    f"{row.place}: the prompt has images and {num_tokens} tokens, and one with "
                    f"images is not cut to rollout.prompt_length={limit}: raise it, or set "
                    "data.overlong_prompts=drop"
                )
            short = shorten(messages, rules.overlong, limit=limit, count=count)
            if short is None:
                raise DataError(
                    f"{row.place}: the prompt has {num_tokens} tokens, and more than "
                    f"rollout.prompt_length={limit} without its longest message: raise it"
                )
            messages, num_tokens = short
    except RenderError as error:
        raise DataError(f"{row.place}: the prompt cannot be rendered: {error}") from error
    loop = rules.loop_of(row)
    made = Prompt(row=row, split=split, loop=loop, messages=messages, num_tokens=num_tokens)
    return made, length


def _overlong_notes(
    overlong: Sequence[tuple[str, int]], split: str, num_rows: int, rules: PromptRules
) -> list[str]:
    if not overlong:
        return []
    first, length = overlong[0]
    found = (
        f"{len(overlong)} of {num_rows} {split} prompts are longer than "
        f"{rules.max_prompt_tokens} tokens; the first is {first} ({length} tokens), the "
        f"longest has {max(length for _, length in overlong)}"
    )
    if rules.overlong == "error":
        raise DataError(
            f"{found}. Raise rollout.prompt_length, leave them out with "
            "data.overlong_prompts=drop, or cut them with left, right or middle"
        )
    done = "left out" if rules.overlong == "drop" else f"cut ({rules.overlong})"
    return [f"{done}: {found}"]


def _unused_kwargs(rows: Sequence[Row], split: str, tools: Mapping[str, Tool]) -> list[str]:
    unused: Counter[str] = Counter()
    for row in rows:
        extra = row.columns.get("extra_info")
        kwargs = extra.get("tools_kwargs") if isinstance(extra, Mapping) else None
        if isinstance(kwargs, Mapping):
            # A parquet column of structs holds null for every tool that any other row has.
            unused.update(k for k, v in kwargs.items() if v is not None and k not in tools)
    return [
        f"{count} {split} rows have tools_kwargs for {name!r}, but no such tool is configured"
        for name, count in sorted(unused.items())
    ]
