"""The trajectory files: bytes per token, speed of writing and of queries, and what a step pays.

`--what write`: a step of 128 trajectories of 4,096 tokens, random words of a Zipf vocabulary, with
the text, the log-probabilities of server and policy, the entropy and the advantage of each token.
As no two of its floats are alike, they compress less than those of a model that is sure.

`--what rows`: what is done before, of 64 such trajectories with the demo's tokenizer.

`--what query`: 100,000 short trajectories in 100 files, asked as the web page asks::

    ./pants run benchmarks/trajectory_store.py -- --what rows write query
    ./pants run benchmarks/trajectory_store.py -- --what step --rounds 5

`--what step`: the calculator demo, in turns with all trajectories kept and with a budget of 0,
which keeps 8 of a step's 128.

Figures are of processor time of all threads, which other processes of a shared machine change
least; wall time is beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.agent_loop import (
    AgentTask,
    Message,
    Origin,
    Span,
    StopReason,
    Tokens,
    Trajectory,
)
from treadle.agent_loop.hf import HfRenderer
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.client.types import TokenValues
from treadle.policy.config.algorithm import AlgorithmConfig
from treadle.tracing.trajectories import DIRECTORY, Filter, TrajectoryFiles, write_file
from treadle.tracing.trajectories.testing import make_row
from treadle.tracing.trajectories.testing import make_rows as make_short_rows
from treadle.trainer.demo import MODELS
from treadle.trainer.training_loop.groups import groups_of, make_batch
from treadle.trainer.training_loop.trajectory_rows import make_rows

WORDS = 20_000


@dataclass(frozen=True)
class Measured:
    """Medians."""

    processor_s: float
    wall_s: float

    @classmethod
    def of(cls, work: Callable[[], object], rounds: int) -> Measured:
        """Measures some work several times."""
        processor: list[float] = []
        wall: list[float] = []
        for _ in range(rounds):
            began, began_wall = time.process_time(), time.perf_counter()
            work()
            processor.append(time.process_time() - began)
            wall.append(time.perf_counter() - began_wall)
        return cls(statistics.median(processor), statistics.median(wall))

    def __str__(self) -> str:
        return f"{self.processor_s * 1e3:,.0f} ms (wall {self.wall_s * 1e3:,.0f})"


def long_rows(count: int, length: int, prompt: int, samples: int = 8) -> Iterator[dict[str, Any]]:
    """Yields trajectories of `length` tokens; those of a group share the first `prompt`."""
    draw = np.random.default_rng(0)
    letters = np.array([*"abcdefghijklmnopqrstuvwxyz"])
    words = ["".join(draw.choice(letters, size)) for size in draw.integers(2, 9, WORDS)]
    chances = 1 / np.arange(1, WORDS + 1)
    chances /= chances.sum()
    for number in range(count):
        if number % samples == 0:
            question = draw.choice(WORDS, prompt, p=chances)
        ids = np.concatenate([question, draw.choice(WORDS, length - prompt, p=chances)])
        sampled = np.arange(length) >= prompt
        logprobs = np.where(sampled, -draw.exponential(0.3, length), np.nan)
        texts = [" ".join(words[i] for i in part) for part in (ids[:prompt], ids[prompt:])]
        parts = (("prompt", 0, prompt, None), ("sampled", prompt, length, 3))
        messages = zip(("user", "assistant"), texts, strict=True)
        yield make_row(1, "train", 1, 1) | {
            "task_id": f"train/{number // samples}",
            "rollout_index": number % samples,
            "num_tokens": length,
            "num_sampled_tokens": length - prompt,
            "messages": json.dumps([{"role": r, "content": text} for r, text in messages]),
            "samples": [
                {
                    "ids": ids.astype(np.int32),
                    "spans": [
                        {"origin": o, "start": a, "stop": b, "weight_version": v, "text": text}
                        for (o, a, b, v), text in zip(parts, texts, strict=True)
                    ],
                    "logprobs": logprobs.astype(np.float32),
                    "policy_logprobs": (logprobs + draw.normal(0, 0.005, length)).astype(
                        np.float32
                    ),
                    "entropy": np.where(sampled, draw.exponential(0.4, length), np.nan).astype(
                        np.float32
                    ),
                    "advantages": np.where(sampled, 0.5, np.nan).astype(np.float32),
                }
            ],
        }


def measure_writing(rounds: int) -> Iterator[str]:
    """Yields what a step of long trajectories takes."""
    count, length = 128, 4096
    rows = list(long_rows(count, length, prompt=512))
    tokens = count * length
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def write() -> int:
            return write_file(directory, step=1, phase="train", rows=rows)

        size, measured = write(), Measured.of(write, rounds)
    yield f"write: {size / tokens:.1f} bytes per token"
    yield (
        f"write: {tokens:,} tokens in {measured}: {tokens / measured.processor_s / 1e6:.1f} "
        f"million tokens and {size / measured.processor_s / 1e6:.0f} MB per processor second"
    )


def measure_rows(rounds: int) -> Iterator[str]:
    """Yields what it takes to make rows of a step's trajectories, with the text of their tokens."""
    trajectories = list(long_trajectories(64, 4096, prompt=512))
    estimator = find_estimator(AlgorithmConfig())
    batch = make_batch(groups_of(trajectories), estimator, version=1)
    values_M = np.zeros(sum(s.num_loss_tokens for s in batch.sequences), np.float32)
    tokens = TokenValues(logprobs_M=values_M, entropy_M=values_M)
    decode = HfRenderer.from_directory(MODELS["demo:calculator"]).decode

    def make() -> None:
        for _ in make_rows(
            trajectories, step=1, phase="train", decode=decode, batch=batch, tokens=tokens
        ):
            pass

    measured = Measured.of(make, rounds)
    count = sum(len(t.tokens.ids) for t in trajectories)
    yield (
        f"rows: {count:,} tokens in {measured}: "
        f"{count / measured.processor_s / 1e6:.1f} million tokens per processor second"
    )


def long_trajectories(count: int, length: int, prompt: int) -> Iterator[Trajectory]:
    """Yields trajectories of random ids, in groups of 8 whose rewards differ."""
    draw = random.Random(0)
    mask = (False,) * prompt + (True,) * (length - prompt)
    spans = (
        Span(origin=Origin.PROMPT, start=0, stop=prompt),
        Span(origin=Origin.SAMPLED, start=prompt, stop=length, weight_version=1),
    )
    for number in range(count):
        task = AgentTask(
            task_id=f"train/{number // 8}",
            sample_index=number // 8,
            rollout_index=number % 8,
            loop="single_turn_agent",
            messages=(Message(role="user", content="What is 6 * 7?"),),
        )
        tokens = Tokens(
            ids=tuple(draw.randrange(1000) for _ in mask),
            logprobs=tuple(-draw.random() if sampled else 0.0 for sampled in mask),
            spans=spans,
        )
        yield Trajectory(
            task=task,
            samples=(tokens,),
            messages=task.messages,
            stop=StopReason.FINISHED,
            reward=float(number % 2),
        )


def measure_queries(rounds: int) -> Iterator[str]:
    """Yields what queries over 100,000 trajectories take."""
    steps, rows, samples = 100, 125, 8
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        for step in range(1, steps + 1):
            write_file(
                run / DIRECTORY,
                step=step,
                phase="train",
                rows=make_short_rows(step, "train", rows=rows, samples=samples),
            )

        def open_and_count() -> None:
            with TrajectoryFiles(run) as opened:
                assert opened.count() == steps * rows * samples

        yield f"query: {steps * rows * samples:,} trajectories in {steps} files"
        yield f"query: open and count: {Measured.of(open_and_count, rounds)}"
        with TrajectoryFiles(run) as files:
            asked: dict[str, Callable[[], object]] = {
                "count of reward<0.5": lambda: files.count(Filter.parse("reward<0.5")),
                "first page of 50": lambda: files.query(limit=50),
                "page of step=70 tool=python by reward": lambda: files.query(
                    Filter.parse("step=70 tool=python"), order_by=["-reward"], limit=50
                ),
                "page 100 by duration": lambda: files.query(
                    order_by=["-duration_s"], limit=50, offset=5_000
                ),
                "page of text~, which reads all messages": lambda: files.query(
                    Filter.parse('text~"answer is 306"'), limit=50
                ),
                "mean reward by step, in SQL": lambda: files.sql(
                    "SELECT step, avg(reward) FROM trajectories GROUP BY step"
                ),
                "one trajectory, all columns": lambda: files.one(50, "train", "train/60", 3),
            }
            for what, ask in asked.items():
                yield f"query: {what}: {Measured.of(ask, rounds)}"


def measure_steps(rounds: int) -> Iterator[str]:
    """Yields what a run of the demo takes with and without the files."""
    wall: list[float] = []
    processor: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            run = Path(name) / f"{number}"
            kept = _train(run / "all", 10**11)
            without = _train(run / "few", 0)
            wall.append(kept.wall_s / without.wall_s)
            processor.append(kept.processor_s / without.processor_s)
            yield f"step: {kept} with all, {without} with few"
        with TrajectoryFiles(run / "all") as files:
            table = files.sql("SELECT sum(num_tokens) AS n FROM trajectories")
        size = sum(path.stat().st_size for path in (run / "all" / DIRECTORY).iterdir())
        yield f"step: {size / int(table.column('n')[0].as_py()):.1f} bytes per token of the demo"
    for what, ratios in (("processor time", processor), ("median step", wall)):
        yield (
            f"step: ratio of the {what} {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


def _train(run: Path, max_bytes: int) -> Measured:
    """Trains the demo; returns the seconds of its processes, and of its median step."""
    arguments = (
        f"run.dir={run}",
        f"run.trajectories_max_bytes={max_bytes}",
        *("schedule.total_steps=12", "schedule.val_every=null", "schedule.val_before_train=false"),
        *("schedule.save_every=null", "schedule.save_last=false"),
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "treadle.trainer.main", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return Measured(
        processor_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        wall_s=statistics.median(line["time/step_s"] for line in lines[1:]),
    )


MEASURES = {
    "rows": measure_rows,
    "write": measure_writing,
    "query": measure_queries,
    "step": measure_steps,
}


def main() -> None:
    """Prints a line per figure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--what", nargs="+", choices=tuple(MEASURES), default=("rows", "write", "query")
    )
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    for what in args.what:
        for line in MEASURES[what](args.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
