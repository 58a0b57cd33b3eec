"""The rules: what rows may ask for, and the check that each of them can be attempted as it is.

Invariant: a row that passes names a loop that exists, selects tools and an interaction that exist,
and holds nothing that would be ignored. The check needs neither tokenizer nor model, so that it
comes before anything is started. Pure; nobody waits.
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
        loops: The loops that there are.
        default_loop: The loop of rows without `agent_name`.
        max_prompt_tokens: Bound of the rendered prompt.
        overlong: What becomes of a row beyond it.
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
        """The name of the loop that runs a row."""
        name = row.columns.get("agent_name")
        return name if isinstance(name, str) else self.default_loop

    def tools_of(self, row: Row) -> Mapping[str, Tool]:
        """The tools that a row's loop shows to the model.

        Raises:
            SetupError: The row selects a tool that is not there.
        """
        if self.loop_of(row) == SINGLE_TURN_AGENT:
            return {}
        return selected_tools(_probe(row), self.tools)


def check_rows(rows: Sequence[Row], *, split: str, rules: PromptRules) -> None:
    """Refuse rows that would not do what they, or the configuration, say.

    Args:
        rows: As `read_rows` gives them.
        split: Names the rows in messages: "train" or "val".
        rules: What there is.

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
                'neither: make its agent_name "tool_agent"'
            )
        _check_has_what_is_needed(row, (*tools.values(), interaction))
        _check_is_text(row)
    if rules.tools:
        _check_tools_are_reached(rows, split, known, rules)


def _probe(row: Row) -> AgentTask:
    """The row as loops see it, before anything is known about its messages."""
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
            f"{row.place}: the column {column!r} holds {count} of them, and the policy that is "
            "trained reads text only; leave such rows out, or take the column away if the "
            "question can be answered without"
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
            'make it "tool_agent", or configure no tools'
        )
    if known and not any(rules.tools_of(row) for row in rows):
        raise DataError(
            f"tools are configured, but every {split} row selects none of them in "
            "extra_info.tool_selection: name some, or configure no tools"
        )
