"""Prompts: rows that are ready to run, with everything about them decided at start.

Invariant: a `Prompt` names a loop that exists, its messages are those the loop receives, and its
rendered length, including tool schemas, is within the limit. An invalid row is an error before the
first step; an overlong one is dropped and counted if the configuration says so. Rendering a large
dataset takes a while; the caller chooses the thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.agent_loop import (
    AgentTask,
    ChatRenderer,
    Message,
    RenderError,
    Tool,
    derive_seed,
)
from treadle.trainer.data.dataset import Row
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.rules import PromptRules, check_rows


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
                fields={k: v for k, v in self.row.columns.items() if k != "prompt"},
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
        notes: Lines to print at start: the number of dropped rows, and settings in rows that
            nothing reads.
    """

    prompts: tuple[Prompt, ...]
    num_dropped: int
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
        rows: As returned by `read_rows`.
        split: Names the rows in task ids and messages: "train" or "val".
        rules: What the configuration allows.
        renderer: Renderer of the model.

    Raises:
        DataError: `check_rows` rejects a row; the template rejects a prompt; a prompt is too long
            and `rules.overlong` is "error"; or every prompt was dropped.
    """
    check_rows(rows, split=split, rules=rules)
    prompts: list[Prompt] = []
    overlong: list[tuple[Row, int]] = []
    for row in rows:
        messages = _messages(row)
        specs = tuple(tool.spec for tool in rules.tools_of(row).values())
        try:
            num_tokens = len(renderer.render(messages, tools=specs).ids)
        except RenderError as error:
            raise DataError(f"{row.place}: the prompt cannot be rendered: {error}") from error
        if num_tokens > rules.max_prompt_tokens:
            overlong.append((row, num_tokens))
            continue
        loop = rules.loop_of(row)
        prompts.append(
            Prompt(row=row, split=split, loop=loop, messages=messages, num_tokens=num_tokens)
        )
    notes = [
        *_overlong_notes(overlong, split, len(rows), rules),
        *_unused_kwargs(rows, split, rules.tools),
    ]
    if not prompts:
        raise DataError(f"no {split} row is left: {'; '.join(notes)}")
    return PromptSet(prompts=tuple(prompts), num_dropped=len(overlong), notes=tuple(notes))


def _messages(row: Row) -> tuple[Message, ...]:
    prompt = row.columns["prompt"]
    assert isinstance(prompt, list), "read_rows has checked it"
    return tuple(Message(role=item["role"], content=item["content"]) for item in prompt)


def _overlong_notes(
    overlong: Sequence[tuple[Row, int]], split: str, num_rows: int, rules: PromptRules
) -> list[str]:
    if not overlong:
        return []
    first, length = overlong[0]
    found = (
        f"{len(overlong)} of {num_rows} {split} prompts are longer than "
        f"{rules.max_prompt_tokens} tokens; the first is {first.place} ({length} tokens), the "
        f"longest has {max(length for _, length in overlong)}"
    )
    if rules.overlong == "error":
        raise DataError(
            f"{found}. Raise rollout.prompt_length, or leave them out with "
            "data.overlong_prompts=drop"
        )
    return [f"left out: {found}"]


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
