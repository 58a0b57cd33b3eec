"""One trajectory as a conversation: what was said, called and answered, and how it was scored.

Invariant: everything of the run is inert text, and never markup; see `inert`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from treadle.tracing.inert import inert

__all__ = ["ConversationScreen", "conversation"]

_STYLES: Final = {
    "system": "dim",
    "user": "cyan",
    "assistant": "green",
    "tool": "yellow",
}
"""Sampled text is green; what others wrote is not."""


class ConversationScreen(Screen[None]):
    """Shows one trajectory; Escape leads back.

    Args:
        trajectory: All columns of one row.
    """

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q", "app.pop_screen", "Back")]

    def __init__(self, trajectory: Mapping[str, Any]) -> None:
        super().__init__()
        self._trajectory = trajectory

    def compose(self) -> ComposeResult:
        """Yields the widgets."""
        yield VerticalScroll(Static(conversation(self._trajectory), id="conversation"))
        yield Footer()

    def on_mount(self) -> None:
        """Lets the arrow keys scroll."""
        self.query_one(VerticalScroll).focus()


def conversation(trajectory: Mapping[str, Any]) -> Text:
    """Returns a trajectory as text: its numbers, its findings, its messages, its error."""
    text = Text()
    place = "step {step}  {phase}  {task_id}  rollout {rollout_index}".format_map(trajectory)
    text.append(inert(place) + "\n", "bold")
    text.append(inert("   ".join(_numbers(trajectory))) + "\n")
    for finding in trajectory["findings"]:
        text.append(inert(f"{finding['kind']}: {finding['text']}") + "\n", "magenta")
    for message in _messages(trajectory["messages"]):
        role = str(message.get("role"))
        text.append(f"\n{inert(role)}", f"bold {_STYLES.get(role, '')}".strip())
        if name := message.get("name"):
            text.append(f" {inert(str(name))}", "bold")
        text.append("\n")
        for part in _parts(message):
            text.append(inert(part) + "\n", _STYLES.get(role, ""))
    if trajectory["error"] is not None:
        text.append("\n" + inert(f"error: {trajectory['error']}") + "\n", "bold red")
    if trajectory["traceback"] is not None:
        text.append(inert(trajectory["traceback"]), "red")
    return text


def _numbers(trajectory: Mapping[str, Any]) -> Iterator[str]:
    for name, unit in (
        ("reward", ""),
        ("advantage", ""),
        ("num_turns", ""),
        ("num_sampled_tokens", ""),
        ("duration_s", " s"),
    ):
        value = trajectory[name]
        yield f"{name.removesuffix('_s')} {'-' if value is None else f'{value:.4g}{unit}'}"
    for name in ("stop", "answer", "ground_truth"):
        yield f"{name} {'-' if trajectory[name] is None else trajectory[name]}"


def _messages(text: str) -> Sequence[Mapping[str, Any]]:
    messages = json.loads(text)
    return [message for message in messages if isinstance(message, Mapping)]


def _parts(message: Mapping[str, Any]) -> Iterator[str]:
    if reasoning := message.get("reasoning"):
        yield f"(reasoning) {reasoning}"
    for image in message.get("images") or ():
        yield f"(image) {image}"
    content = message.get("content")
    if isinstance(content, str):
        if content:
            yield content
    elif content is not None:
        yield json.dumps(content, ensure_ascii=False)
    for call in message.get("tool_calls") or ():
        yield f"-> {call.get('name')}({json.dumps(call.get('arguments'), ensure_ascii=False)})"
