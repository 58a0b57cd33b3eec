"""The rules for rows: what a row may select, and the check that it can run as written.

Invariant: a row that passes names a loop, tools and an interaction that exist, and contains nothing
that would be ignored. The check needs neither tokenizer nor model, so it runs before any process
starts. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from treadle.agent_loop import (
    SINGLE_TURN_AGENT,
    AgentTask,
    ChecksTask,
    Interaction,
    LoopRegistry,
    Message,
    MethodTool,
    SetupError,
    Tool,
    ToolAgentLoop,
    scores_itself,
    selected_interaction,
    selected_tools,
)
from treadle.trainer.data.errors import DataError
from treadle.trainer.data.images import row_messages
from treadle.trainer.data.row import Row
from treadle.trainer.data.row_problems import RowProblems


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """How rows become prompts.

    Attributes:
        default_loop: The loop of rows without `agent_name`.
        max_prompt_tokens: Maximum length of the rendered prompt.
        tools: By name; empty if no tools are configured.
        images: Whether rows may have images: if the model sees, or is not known.
    """

    loops: LoopRegistry
    default_loop: str
    max_prompt_tokens: int
    overlong: Literal["error", "drop", "left", "right", "middle"]
    tools: Mapping[str, Tool] = field(default_factory=dict)
    interactions: Mapping[str, Interaction] = field(default_factory=dict)
    images: bool = False

    def loop_of(self, row: Row) -> str:
        """Returns the name of the loop that runs a row."""
        return _loop_of(row, self.default_loop)

    def scored_by_loop(self, row: Row) -> bool:
        """Returns whether a row's loop scores its trajectories itself.

        Raises:
            SetupError: The loop does not exist or does not load.
        """
        loop = self.loops.resolve(self.loop_of(row))
        return scores_itself(loop) or (
            isinstance(loop, ToolAgentLoop)
            and any(
                isinstance(tool, MethodTool) and tool.owner.scores
                for tool in self.tools_of(row).values()
            )
        )

    def tools_of(self, row: Row) -> Mapping[str, Tool]:
        """Returns the tools that a row's loop shows to the model.

        Raises:
            SetupError: The row selects an unknown tool.
        """
        if self.loop_of(row) == SINGLE_TURN_AGENT:
            return {}
        return selected_tools(_probe(row), self.tools)


def check_row_loops(
    rows: Sequence[Row], *, split: str, loops: LoopRegistry, default_loop: str
) -> None:
    """Rejects rows whose loop does not exist or does not load.

    Args:
        split: Names the rows in messages: "train" or "val".
        default_loop: The loop of rows without `agent_name`.

    Raises:
        DataError: There is one such row, or several for one reason.
        SeveralProblems: There are several reasons.
    """
    resolved = _ResolvedLoops(loops)
    found = RowProblems(f"{split} rows")
    for row in rows:
        if (error := resolved.error(_loop_of(row, default_loop))) is not None:
            found.add(row.place, str(error), error)
    found.raise_if_any()


def check_rows(rows: Sequence[Row], *, split: str, rules: PromptRules) -> None:
    """Rejects rows that cannot run as they, or the configuration, specify.

    Args:
        split: Names the rows in messages: "train" or "val".
        rules: The available loops, tools and interactions.

    Raises:
        DataError: A row names an unknown loop, tool or interaction, or tools or an interaction
            that its loop does not have; lacks what one of them needs; has videos, or images that
            are not allowed or cannot be read; or names no loop although tools are configured and
            the default loop calls none. Or tools are configured and no row reaches them.
        SeveralProblems: There are several such reasons.
    """
    loops = _ResolvedLoops(rules.loops)
    found = RowProblems(f"{split} rows")
    for row in rows:
        for problem, error in _problems_of(row, rules, loops):
            found.add(row.place, problem, error)
    found.raise_if_any()
    if rules.tools:
        _check_tools_are_reached(rows, split, rules)


def check_each(rows: Sequence[Row], *, split: str, problem: Callable[[Row], str | None]) -> None:
    """Rejects rows for which `problem` returns a text.

    Raises:
        DataError: There is one such row, or several with one text.
        SeveralProblems: There are several texts.
    """
    found = RowProblems(f"{split} rows")
    for row in rows:
        if (text := problem(row)) is not None:
            found.add(row.place, text)
    found.raise_if_any()


class _ResolvedLoops:
    """Loops by name, each resolved once: one that does not load is not loaded for every row."""

    def __init__(self, loops: LoopRegistry) -> None:
        self._loops = loops
        self._errors: dict[str, SetupError | None] = {}

    def error(self, name: str) -> SetupError | None:
        """Returns why the loop cannot be made, None if it can."""
        if name not in self._errors:
            self._errors[name] = None
            try:
                self._loops.resolve(name)
            except SetupError as error:
                self._errors[name] = error
        return self._errors[name]


def _problems_of(
    row: Row, rules: PromptRules, loops: _ResolvedLoops
) -> Iterator[tuple[str, SetupError | None]]:
    """Yields each problem of a row, and the error that reported it, if any."""
    loop = rules.loop_of(row)
    if (unknown := loops.error(loop)) is not None:
        yield str(unknown), unknown
        return
    tools: Mapping[str, Tool] = {}
    interaction = None
    try:
        tools = rules.tools_of(row)
    except SetupError as error:
        yield str(error), error
    try:
        interaction = selected_interaction(_probe(row), rules.interactions)
    except SetupError as error:
        yield f"{error}; set agent.interaction_catalogue", error
    if loop == SINGLE_TURN_AGENT and (interaction is not None or _selects_tools(row)):
        unused = "selects tools" if interaction is None else "names an interaction"
        yield (
            f"the row {unused} and runs as {SINGLE_TURN_AGENT!r}, which has neither: set its "
            'agent_name to "tool_agent"',
            None,
        )
    for opened in (*tools.values(), interaction):
        if isinstance(opened, ChecksTask):
            try:
                opened.check_task(_probe(row))
            except SetupError as error:
                yield str(error), error
    for problem in _what_is_no_text(row, images=rules.images):
        yield problem, None


def _loop_of(row: Row, default_loop: str) -> str:
    name = row.columns.get("agent_name")
    return name if isinstance(name, str) else default_loop


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


def _what_is_no_text(row: Row, *, images: bool) -> Iterator[str]:
    if images or not row.columns.get("images"):
        try:
            row_messages(row)
        except ValueError as error:
            yield str(error)
    for column in ("videos",) if images else ("images", "videos"):
        value = row.columns.get(column)
        if value is None or (isinstance(value, Sequence) and not value):
            continue
        count = len(value) if isinstance(value, Sequence) and not isinstance(value, str) else 1
        yield (
            f"the column {column!r} holds {count} of them, and "
            + ("only images are read: " if images else "model.path reads text only: ")
            + "remove such rows, or the column if the question can be answered without it"
            + ("" if images else ", or take a model that sees (docs/models.md)")
        )


def _check_tools_are_reached(rows: Sequence[Row], split: str, rules: PromptRules) -> None:
    loops = {rules.loop_of(row) for row in rows}
    unnamed = [row.place for row in rows if row.columns.get("agent_name") is None]
    if unnamed and rules.default_loop == SINGLE_TURN_AGENT:
        raise DataError(
            f"tools are configured, but {len(unnamed)} of {len(rows)} {split} rows have no "
            f"agent_name and would run as {SINGLE_TURN_AGENT!r}, which calls no tool; the first is "
            f'{unnamed[0]}. Add "agent_name": "tool_agent" to the rows, or set '
            "agent.default_loop=tool_agent"
        )
    if loops == {SINGLE_TURN_AGENT}:
        raise DataError(
            f"tools are configured, but the agent_name of every {split} row is "
            f"{SINGLE_TURN_AGENT!r}, which calls no tool: "
            'set it to "tool_agent", or configure no tools'
        )
    if loops and not any(rules.tools_of(row) for row in rows):
        raise DataError(
            f"tools are configured, but every {split} row selects none of them in "
            "extra_info.tool_selection: name some, or configure no tools"
        )
