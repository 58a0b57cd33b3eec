"""The trajectories of a run as conversations to imitate: rows for `treadle sft`.

Invariant: every conversation ends with a turn that the model ended itself, and its prompt shows the
tools that the loop of its row showed. What cannot be imitated is counted by its reason.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from treadle.agent_loop import IMAGE_MARK, SetupError
from treadle.trainer.checkpoint.run_directory import CONFIG
from treadle.trainer.config.load import load_config
from treadle.trainer.config.schema import Config
from treadle.trainer.data import Row, read_rows
from treadle.trainer.data.own_reader import load_reader
from treadle.trainer.rollout.loops_from_config import prompt_rules

__all__ = ["NEEDED", "RunConversations"]

NEEDED: Final = ("task_id", "stop", "messages", "findings")
"""The columns of a trajectory that a conversation is made of."""

_CUT = ("turn_length", "response_length", "context_length")
_BROKEN = ("error", "agent_failed")


class RunConversations:
    """Makes the conversations of a run.

    Attributes:
        left_out: Number of trajectories that are no example, by the reason.
    """

    def __init__(self, run: Path) -> None:
        """Reads the run's configuration and tools.

        Raises:
            ConfigError: The configuration is missing, or cannot be read.
            SetupError: A tool or a loop cannot be loaded.
        """
        self._run = run
        self._config: Config = load_config([run / CONFIG], ()).config
        self._rules = prompt_rules(self._config, images=True)
        self._rows = cache(self._read)
        self.left_out = Counter[str]()

    def of(
        self, trajectories: Iterable[Mapping[str, Any]], *, per_row: int | None = None
    ) -> Iterator[dict[str, object]]:
        """Yields a row for `treadle sft` for each trajectory that can be imitated.

        Args:
            trajectories: Rows with the columns `NEEDED`.
            per_row: Maximum number of conversations of one row, which all differ; None: no limit.

        Raises:
            SetupError: A row of the run's data is missing.
            DataError: The run's data cannot be read.
        """
        kept = Counter[str]()
        seen: set[tuple[str, str]] = set()
        for trajectory in trajectories:
            task, text = trajectory["task_id"], trajectory["messages"]
            messages = json.loads(text)
            if reason := _unfit(trajectory, messages):
                self.left_out[reason] += 1
            elif (task, text) in seen:
                self.left_out["the same conversation again"] += 1
            elif kept[task] == per_row:
                self.left_out["more of a row than --per-row"] += 1
            else:
                seen.add((task, text))
                kept[task] += 1
                yield self._conversation(task, messages)

    def _conversation(self, task: str, messages: Sequence[dict[str, Any]]) -> dict[str, object]:
        split, _, index = task.partition("/")
        try:
            row = self._rows(split)[int(index)]
        except (IndexError, ValueError):
            raise SetupError(
                f"{task} is a trajectory of {self._run}, and the files of data.{split}_files have "
                "no such row: the rows of the run are needed for the tools that its prompts show"
            ) from None
        tools = self._rules.tools_of(row).values()
        shown = [self._run / "images" / name for m in messages for name in m.get("images", ())]
        made: dict[str, object] = {"messages": [_message(message) for message in messages]}
        if tools:
            made["tools"] = [tool.spec.as_schema() for tool in tools]
        if shown:
            made["images"] = [{"path": str(path.absolute())} for path in shown]
        return made

    def _read(self, split: str) -> Sequence[Row]:
        data = self._config.data
        files = data.train_files if split == "train" else data.val_files
        reader = None if data.reader is None else load_reader(data.reader)
        return read_rows(files, reader=reader, in_files=data.streaming)


def _unfit(trajectory: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns why a trajectory is no example; None if it is one."""
    if trajectory["stop"] in _BROKEN:
        return "it failed"
    if trajectory["stop"] in _CUT:
        return "a limit of length ended it"
    if not messages or messages[-1]["role"] != "assistant":
        return "it does not end with the model's turn"
    if any(finding["kind"] == "malformed_call" for finding in trajectory["findings"]):
        return "it has a malformed call"
    return None


def _message(kept: Mapping[str, Any]) -> dict[str, object]:
    """Returns a message of a trajectory file in the columns of fine-tuning."""
    message = {k: v for k, v in kept.items() if k not in ("images", "reasoning", "tool_calls")}
    images = kept.get("images", ())
    if images and IMAGE_MARK not in kept["content"]:
        message["content"] = IMAGE_MARK * len(images) + kept["content"]
    if kept.get("reasoning"):
        message["reasoning_content"] = kept["reasoning"]
    if calls := kept.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return message
