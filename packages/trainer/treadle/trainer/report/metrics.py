"""The metrics log: `metrics.jsonl`, one JSON object per step, and the names in it.

Invariant: the file always describes the run up to some step. A line is on the disk before `append`
returns; a line that a crash cut short is dropped when the log is opened again; a run that resumes
after step s removes later lines, as those steps will run again. Steps increase.
The driver writes, from one task.

The names that the summary, the curves and the progress display read are constants here. Any other
name may be logged beside them; every `time/<phase>_s` other than `time/step_s` is a phase.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final, Self

from treadle.trainer.report.seals import keep_seals, read_seals, seal
from treadle.trainer.report.terminal.lines import keep_lines, read_lines, undamaged_lines

STEP: Final = "step"
"""Optimizer steps taken; 0 is the state before training."""
REWARD: Final = "reward/mean"
"""Mean reward of the step's training trajectories."""
REWARD_MIN: Final = "reward/min"
REWARD_MAX: Final = "reward/max"
SIGNAL: Final = "groups/with_signal"
"""Share of the trained groups, 0 to 1, whose rewards differ; only they change the weights."""
TOOL_RATE: Final = "tool/call_rate"
"""Share of the step's training trajectories, 0 to 1, that called a tool."""
TRAIN_LOSS: Final = "train/loss"
"""Supervised fine-tuning: mean -log p of what the assistant said in the step's batch, in nats."""
VAL_LOSS: Final = "val/loss"
"""The same per token of the held-out conversations; only in steps that validated."""
VAL_REWARD: Final = "val/reward"
"""Mean reward on the held-out rows; only in steps that validated."""
VAL_ACCURACY: Final = "val/accuracy"
"""Share of right answers on the held-out rows, 0 to 1, if the reward separates right from wrong."""
VAL_TOOL_RATE: Final = "val/tool_call_rate"
"""Share of the validation trajectories, 0 to 1, that called a tool."""
STEP_S: Final = "time/step_s"
"""Seconds from the start of the step to its end, all phases included."""
ROLLOUT_S: Final = "time/rollout_s"
STALENESS: Final = "staleness/mean"
"""Only where groups are sampled beside training, so that `ROLLOUT_S` is not the time it took."""
TRAIN_S: Final = "time/train_s"
SAMPLED_TOKENS: Final = "tokens/sampled"
"""Tokens that the model sampled in the step's training trajectories."""
VALIDATE_S: Final = "time/validate_s"
"""Seconds that the validation took; only in steps that validated."""
SAVE_S: Final = "time/save_s"
"""Seconds that the checkpoint took; only in steps that saved one."""
TRAINED_TOKENS: Final = "tokens/trained"
"""Tokens that went through the training step, prompts and tool results included."""
ENTROPY: Final = "actor/entropy"
"""Entropy of the policy, in nats per token; absent in a step without signal."""
GRAD_NORM: Final = "actor/grad_norm"
"""Norm of the gradient before it is clipped."""
MISMATCH: Final = "rollout/logprob_diff"
"""With _mean, _p99, _max: nats between a server's and the policy's log-probability of a token."""
FRESH_MISMATCH: Final = "rollout/logprob_diff_fresh"
"""The same without tokens in which older weights had a part, where there are such tokens."""
KL: Final = "rollout/kl"
"""KL(servers || policy), nats per token."""
STALE_TOKENS: Final = "rollout/stale_tokens"
"""Share of the tokens, 0 to 1, in which older weights had a part."""
SERVER_TIME: Final = "servers/time_share/"
"""With a cause of `time_shares.servers`: share of the step, mean over the servers."""
RANK_TIME: Final = "policy/time_share/"
"""With a cause of `time_shares.ranks`: share of the step, mean over the policy ranks."""
RANK_RATE: Final = "policy/tokens_per_second"
"""Tokens that went through the optimizer steps, over their time and the number of ranks."""
MFU: Final = "policy/mfu"
"""Needed arithmetic of the optimizer steps over the peak of the GPUs, 0 to 1; where it is known."""
SERVERS_LOST: Final = "servers/lost"
SERVERS_RESTARTED: Final = "servers/restarted"

Record = Mapping[str, float]
"""One line of the file. What was not finite (or null in the file) is NaN."""


class MetricsLog:
    """Appends to `path`, which is created with its directory.

    Args:
        resume_after: Keep the lines up to and including this step, and remove later ones. None: a
            new run.

    Raises:
        FileExistsError: `resume_after` is None and the file already holds lines.
    """

    def __init__(self, path: Path, *, resume_after: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            self._last_step = keep_lines(path, resume_after)
        elif path.exists() and path.stat().st_size:
            raise FileExistsError(
                f"{path} holds the metrics of another run: resume it, or choose another run.dir"
            )
        else:
            self._last_step = -1
        keep_seals(path.parent, resume_after)
        self._path = path
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        sealed = [step for step, name, _ in read_seals(path.parent) if name == path.name]
        if lines and self._last_step not in sealed:  # the run was killed between the two
            self._seal(self._last_step, lines[-1])
        self._file: BinaryIO = path.open("ab", buffering=0)

    @property
    def last_step(self) -> int:
        """The step of the last line, or -1 if there is none."""
        return self._last_step

    def append(self, step: int, values: Record) -> None:
        """Writes the line of `step`; it is on the disk on return.

        Args:
            step: Greater than that of the line before.
            values: Name to number. A value that is not finite is written as null.

        Raises:
            ValueError: `step` does not grow.
            OSError: The disk is full or gone.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step} in the metrics log")
        numbers = {
            name: value if math.isfinite(value) else None
            for name, value in values.items()
            if name != STEP
        }
        line = json.dumps({STEP: step, **numbers}).encode() + b"\n"
        self._file.write(line)
        os.fsync(self._file.fileno())
        self._seal(step, line)
        self._last_step = step

    def _seal(self, step: int, line: bytes) -> None:
        seal(self._path.parent, step, self._path.name, hashlib.sha256(line).hexdigest())

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def last_saved_step(run_dir: Path) -> int | None:
    """Returns the last step of a run that saved a checkpoint, from its metrics log.

    Raises:
        OSError: The file cannot be read.
    """
    path = run_dir / "metrics.jsonl"
    lines = undamaged_lines(path) if path.exists() else ()
    return max((line[STEP] for line in lines if SAVE_S in line), default=None)


def read_metrics(path: Path) -> tuple[Record, ...]:
    """Returns the lines of a metrics log, in order; a last line that is cut short is left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line before the last is damaged; the text names it.
    """
    return tuple(
        {name: _number(path, line[STEP], name, value) for name, value in line.items()}
        for line in read_lines(path)
    )


def _number(path: Path, step: int, name: str, value: object) -> float:
    if value is None:
        return math.nan
    try:
        if isinstance(value, int | float):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(
        f"{path} is damaged: {name!r:.80} of step {step} is not a number: {value!r:.80}"
    )
