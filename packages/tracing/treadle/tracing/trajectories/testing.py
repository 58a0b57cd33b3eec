"""A synthetic run directory: trajectories of a calculator task, written as a run writes them.

The same arguments give the same files. Rewards rise with the step; every seventh trajectory failed,
every fifth has drift, and those of odd rows call `python`, the others `calculator`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.tracing.trajectories.schema import DIRECTORY
from treadle.tracing.trajectories.write import write_file

__all__ = ["make_row", "make_rows", "write_run"]

_START_NS = 1_700_000_000_000_000_000


def write_run(
    run_dir: Path, *, steps: int = 3, rows: int = 4, samples: int = 4, val_rows: int = 2
) -> Path:
    """Writes `trajectories/` of a run: steps 1 to `steps`, and a validation after each.

    Args:
        run_dir: Made if it is missing.
        samples: Trajectories per row of training; a row of validation has one.
        val_rows: Rows per validation; 0: there is none.

    Returns:
        `run_dir`.
    """
    directory = run_dir / DIRECTORY
    for step in range(1, steps + 1):
        write_file(
            directory,
            step=step,
            phase="train",
            rows=make_rows(step, "train", rows=rows, samples=samples),
        )
        if val_rows:
            write_file(
                directory, step=step, phase="val", rows=make_rows(step, "val", rows=val_rows)
            )
    return run_dir


def make_rows(step: int, phase: str, *, rows: int, samples: int = 1) -> Iterator[dict[str, Any]]:
    """Yields the trajectories of a step: `samples` of each of `rows` rows."""
    for row in range(rows):
        for index in range(samples):
            yield make_row(step, phase, row, index)


def make_row(step: int, phase: str, row: int, index: int) -> dict[str, Any]:
    """Returns one trajectory: a question, a call of a tool with its result, and an answer."""
    number = (row * 31 + index * 17 + step) % 7
    chance = random.Random(f"{step} {phase} {row} {index}")
    tool = "python" if row % 2 else "calculator"
    first, second = 2 + row, 3 + row
    question = f"What is {first} * {second}?"
    failed, drifts = number == 0, (row + index + step) % 5 == 0
    answer = first * second + (0 if chance.random() < 0.3 + step / 10 else 1)
    reward = None if failed else float(answer == first * second)
    call = {"id": "0", "name": tool, "arguments": {"expression": f"{first}*{second}"}}
    said: list[dict[str, Any]] = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(first * second), "name": tool, "tool_call_id": "0"},
        {"role": "assistant", "content": f"The answer is {answer}. #### {answer}"},
    ]
    messages = [{"role": "user", "content": question}, *([] if failed else said)]
    trained = phase == "train" and not failed
    advantage = (reward or 0.0) - 0.5 if trained else None
    sample = None if failed else _sample(chance, step, question, said, advantage)
    tokens = 0 if sample is None else len(sample["ids"])
    trace = _trace(chance, f"{phase}/{row}", index, step, tool, failed=failed)
    return {
        "step": step,
        "phase": phase,
        "task_id": f"{phase}/{row}",
        "rollout_index": index,
        "loop": "tool_agent",
        "data_source": "treadle/calculator",
        "ground_truth": str(first * second),
        "reward": reward,
        "answer": None if failed else str(answer),
        "advantage": advantage,
        "stop": "error" if failed else "finished",
        "error": "ToolError: the sandbox is down" if failed else None,
        "traceback": "Traceback (most recent call last):\n  ..." if failed else None,
        "num_turns": 1 if failed else 4,
        "num_tokens": tokens,
        "num_sampled_tokens": 0 if sample is None else _count(sample["spans"], "sampled"),
        "duration_s": trace[0]["duration_ns"] / 1e9,
        "prompt": question,
        "response": "" if failed else said[-1]["content"],
        "tools": [] if failed else [tool],
        "drift": int(drifts),
        "tool_rewards": [] if failed else [0.0],
        "turn_scores": [],
        "sample_rewards": None,
        "messages": json.dumps(messages),
        "samples": [] if sample is None else [sample],
        "findings": [{"kind": "drift", "text": "turn 1: ids 4..6 differ"}] if drifts else [],
        "metrics": {"tool/calls": 0.0 if failed else 1.0},
        "trace": trace,
    }


def _sample(
    chance: random.Random,
    step: int,
    question: str,
    said: list[dict[str, Any]],
    advantage: float | None,
) -> dict[str, Any]:
    """Returns a sample in which every character is a token."""
    call = json.dumps(said[0]["tool_calls"])
    parts = [
        ("prompt", question),
        ("sampled", call),
        ("observed", str(said[1]["content"])),
        ("sampled", str(said[2]["content"])),
    ]
    spans: list[dict[str, Any]] = []
    logprobs: list[float] = []
    start = 0
    for origin, text in parts:
        sampled = origin == "sampled"
        spans.append(
            {
                "origin": origin,
                "start": start,
                "stop": start + len(text),
                "weight_version": step - 1 if sampled else None,
                "text": text,
            }
        )
        logprobs += [-chance.expovariate(3.0) if sampled else math.nan for _ in text]
        start += len(text)
    policy = [value + chance.gauss(0.0, 0.01) for value in logprobs]
    trained = advantage is not None
    return {
        "ids": [ord(letter) for _, text in parts for letter in text],
        "spans": spans,
        "logprobs": logprobs,
        "policy_logprobs": policy if trained else None,
        "entropy": [-value * 1.5 for value in policy] if trained else None,
        "advantages": [value * 0.0 + (advantage or 0.0) for value in policy] if trained else None,
    }


def _count(spans: list[dict[str, Any]], origin: str) -> int:
    return sum(span["stop"] - span["start"] for span in spans if span["origin"] == origin)


def _trace(
    chance: random.Random, task_id: str, index: int, step: int, tool: str, *, failed: bool
) -> list[dict[str, Any]]:
    """Returns the spans: a trajectory with a turn, in it a completion and a tool call."""
    root = f"{chance.getrandbits(64):016x}"
    begin = _START_NS + step * 60_000_000_000 + chance.randrange(1_000_000_000)
    generate, call = chance.randrange(10**8, 10**9), chance.randrange(10**6, 10**8)
    turn = f"{chance.getrandbits(64):016x}"
    error = "ToolError: the sandbox is down" if failed else None
    below = {"task_id": task_id, "rollout_index": index, "step": step}
    spans: tuple[tuple[str, str, str | None, int, int, dict[str, Any], str | None], ...] = (
        ("trajectory", root, None, 0, generate + call, below, error),
        ("turn", turn, root, 0, generate + call, {"index": 0}, error),
        ("generate", f"{chance.getrandbits(64):016x}", turn, 0, generate, {"tokens": 12}, None),
        ("tool", f"{chance.getrandbits(64):016x}", turn, generate, call, {"tool": tool}, error),
    )
    return [
        {
            "name": name,
            "span_id": span_id,
            "parent_id": parent,
            "start_unix_ns": begin + after,
            "duration_ns": duration,
            "attributes": json.dumps(attributes),
            "error": problem,
        }
        for name, span_id, parent, after, duration, attributes, problem in spans
    ]
