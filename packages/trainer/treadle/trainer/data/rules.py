"""The rules for rows: what a row may ask for, and the check that it can run as written.

Invariant: a row that passes names a loop, tools and an interaction that exist, and contains nothing
that would be ignored. The check needs neither tokenizer nor model, so it runs before any process
starts. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treadle.agent_loop import (
    SINGLE_TURN_AGENT,
    AgentTask,
    ChecksTask,
    Interaction,
    LoopRegistry,
    Message,
    SetupError,
    Tool,
    selected_interaction,
    selected_tools,
)
from treadle.trainer.data.dataset import Row
from treadle.trainer.data.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How rows become prompts.

    Attributes:
        loops: The available loops.
        default_loop: The loop of rows without `agent_name`.
        max_prompt_tokens: Maximum length of the rendered prompt.
        overlong: What to do with a longer prompt.
        tools: By name; empty if no tools are configured.
        interactions: By name.
    """

    loops: LoopRegistry
    default_loop: str
    max_prompt_tokens: int
    overlong: Literal["error", "drop"]
    tools: Mapping[str, Tool] = field(default_factory=dict)
    interactions: Mapping[str, Interaction] = field(default_factory=dict)

    def loop_of(self, row: Row) -> str:
        """Returns the name of the loop that runs a row."""
        name = row.columns.get("agent_name")
        return name if isinstance(name, str) else self.default_loop

    def tools_of(self, row: Row) -> Mapping[str, Tool]:
        """Returns the tools that a row's loop shows to the model.

        Raises:
            SetupError: The row selects an unknown tool.
        """
        if self.loop_of(row) == SINGLE_TURN_AGENT:
            return {}
        return selected_tools(_probe(row), self.tools)


def check_rows(rows: Sequence[Row], *, split: str, rules: PromptRules) -> None:
    """Rejects rows that could not run as they, or the configuration, ask.

    Args:
        rows: As returned by `read_rows`.
        split: Names the rows in messages: "train" or "val".
        rules: The available loops, tools and interactions.

    Raises:
        DataError: A row names an unknown loop, tool or interaction, or tools or an interaction
            that its loop does not have; lacks what one of them needs; has images or videos; or
            names no loop although tools are configured and the default loop calls none. Or tools
            are configured and no row reaches them.
    """
    known: set[str] = set()
    for row in rows:
        loop = rules.loop_of(row)
        try:
            if loop not in known:
                rules.loops.resolve(loop)
                known.add(loop)
            tools = rules.tools_of(row)
        except SetupError as error:
            raise DataError(f"{row.place}: {error}") from error
        try:
            interaction = selected_interaction(_probe(row), rules.interactions)
        except SetupError as error:
            raise DataError(f"{row.place}: {error}; set agent.interaction_catalogue") from error
        if loop == SINGLE_TURN_AGENT and (interaction is not None or _selects_tools(row)):
            unused = "selects tools" if interaction is None else "names an interaction"
            raise DataError(
                f"{row.place}: the row {unused} and runs as {SINGLE_TURN_AGENT!r}, which has "
                'neither: set its agent_name to "tool_agent"'
            )
        _check_has_what_is_needed(row, (*tools.values(), interaction))
        _check_is_text(row)
    if rules.tools:
        _check_tools_are_reached(rows, split, known, rules)


def _probe(row: Row) -> AgentTask:
    """Returns the row as a task for checks, with an empty message."""
    return AgentTask(
        task_id=str(row.index),
        sample_index=row.index,
        rollout_index=0,
        loop="",
        messages=(Message(role="user", content=""),),
        fields=row.columns,
    )


def _selects_tools(row: Row) -> bool:
    extra = row.columns.get("extra_info")
    return isinstance(extra, Mapping) and bool(extra.get("tool_selection"))


def _check_has_what_is_needed(row: Row, opened: Iterable[object]) -> None:
    for each in opened:
        if isinstance(each, ChecksTask):
            try:
                each.check_task(_probe(row))
            except SetupError as error:
                raise DataError(f"{row.place}: {error}") from error


def _check_is_text(row: Row) -> None:
    for column in ("images", "videos"):
        value = row.columns.get(column)
        if value is None or (isinstance(value, Sequence) and not value):
            continue
        count = len(value) if isinstance(value, Sequence) and not isinstance(value, str) else 1
        raise DataError(
            f"{row.place}: the column {column!r} holds {count} of them, and the policy has no "
            "vision support: remove such rows, or the column if the question can be answered "
            "without it"
        )


def _check_tools_are_reached(
    rows: Sequence[Row], split: str, known: set[str], rules: PromptRules
) -> None:
    unnamed = [row for row in rows if row.columns.get("agent_name") is None]
    if unnamed and rules.default_loop == SINGLE_TURN_AGENT:
        raise DataError(
            f"tools are configured, but {len(unnamed)} of {len(rows)} {split} rows have no "
            f"agent_name and would run as {SINGLE_TURN_AGENT!r}, which calls no tool; the first is "
            f'{unnamed[0].place}. Add "agent_name": "tool_agent" to the rows, or set '
            "agent.default_loop=tool_agent"
        )
    if known == {SINGLE_TURN_AGENT}:
        raise DataError(
            f"tools are configured, but the agent_name of every {split} row is "
            f"{SINGLE_TURN_AGENT!r}, which calls no tool: "
            'set it to "tool_agent", or configure no tools'
        )
    if known and not any(rules.tools_of(row) for row in rows):
        raise DataError(
            f"tools are configured, but every {split} row selects none of them in "
            "extra_info.tool_selection: name some, or configure no tools"
        )
