"""Every trajectory of a step as text, one file per step: `<directory>/<step>.jsonl`.

Invariant: a file is there whole or not at all; a step that runs again replaces its own. The columns
`input`, `output`, `gts`, `score` and `step` are those of verl's `trainer.rollout_data_dir`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from treadle.agent_loop import Trajectory
from treadle.trainer.report.rollout import accuracy, ground_truth
from treadle.trainer.report.trajectories import Decode

__all__ = ["write_generations"]


def write_generations(
    directory: Path, step: int, trajectories: Sequence[Trajectory], *, decode: Decode
) -> None:
    """Writes the file of a step. Decoding many takes seconds; the caller chooses the thread.

    Args:
        directory: Made if it is missing.
        step: The step; 0 before training.
        trajectories: All of it, in the order of their tasks.
        decode: Token ids to text, special tokens included.

    Raises:
        OSError: It cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f".{step}.jsonl.partial"
    with partial.open("wb") as file:
        for trajectory in trajectories:
            # Rows may hold what JSON does not, as for the trajectory log.
            line = json.dumps(_line(trajectory, step, decode), ensure_ascii=False, default=str)
            file.write(line.encode(errors="backslashreplace") + b"\n")
    os.replace(partial, directory / f"{step}.jsonl")


def _line(trajectory: Trajectory, step: int, decode: Decode) -> dict[str, object]:
    tokens, error = trajectory.tokens, trajectory.error
    prompt = tokens.num_prompt_tokens
    return {
        "input": decode(tokens.ids[:prompt]),
        "output": decode(tokens.ids[prompt:]),
        "gts": ground_truth(trajectory),
        "score": trajectory.reward,
        "step": step,
        "accuracy": None if error is not None else accuracy(trajectory),
        "answer": trajectory.answer,
        "data_source": trajectory.task.fields.get("data_source"),
        "task_id": trajectory.task.task_id,
        "rollout_index": trajectory.task.rollout_index,
        "stop": trajectory.stop.value,
        "error": None if error is None else f"{type(error).__name__}: {error}",
    }
