"""What can be checked of a run without computing the model: its files against each other.

Checked are the seals of what was written, the manifests of checkpoints, the trajectories of each
step (spans, masks, versions), the advantages that the estimator gives for the recorded rewards, the
metrics that follow from the trajectories or add up to 1, and that each group was trained on once
per epoch.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from treadle.policy.algorithms.estimators import FoundEstimator, find_estimator
from treadle.tracing.trajectories import DIRECTORY, file_name, is_as_written
from treadle.trainer.checkpoint.manifest import DamageError, check_manifest
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    CONFIG,
    Checkpoints,
    RunDirectoryError,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.report.metrics import (
    MISMATCH,
    RANK_TIME,
    SERVER_TIME,
    STALE_TOKENS,
    TOOL_RATE,
    Record,
    read_metrics,
)
from treadle.trainer.report.rollout import rollout_metrics
from treadle.trainer.report.seals import read_seals, sha256_of
from treadle.trainer.training_loop.groups import NoGroupLeftError, make_batch
from treadle.trainer.verify.recorded import RecordedStep, RecordError, read_step

__all__ = ["quick_problems", "train_file"]

_METRICS = "metrics.jsonl"


def train_file(step: int) -> str:
    """Returns the file of a training step, from the run directory."""
    return f"{DIRECTORY}/{file_name(step, 'train')}"


def quick_problems(run_dir: Path, config: Config) -> Iterator[str]:
    """Yields what does not fit, one sentence each, in the order of the steps of each check.

    Raises:
        OSError: A file cannot be read.
    """
    yield from _seals(run_dir)
    try:
        metrics = {int(record["step"]): record for record in read_metrics(run_dir / _METRICS)}
    except ValueError as error:
        yield str(error)
        return
    yield from _checkpoints(run_dir, metrics)
    estimator = find_estimator(config.algorithm)
    times: Counter[tuple[str, int]] = Counter()
    for step, record in metrics.items():
        yield from (f"step {step}: {problem}" for problem in _time_shares(record))
        name = train_file(step)
        if step == 0 or not (run_dir / name).exists():
            continue  # a missing file is found by its seal
        try:
            recorded = read_step(run_dir / name)
        except RecordError as error:
            yield f"step {step}: {name} {error}"
            continue
        if not is_as_written(run_dir / name):
            yield (
                f"step {step}: {name} differs from its rows written again (as does a file that "
                "another build of this version of Arrow compressed)"
            )
        problems = [
            *_versions(recorded, step),
            *_repeated(recorded, times, int(record.get("data/epoch", step))),
        ]
        if recorded.is_whole:
            found = _from_trajectories(recorded)
            problems += _batch(recorded, step, config, estimator, found)
            problems += _metrics(found, record)
        for problem in problems:
            yield f"step {step}: {problem}"


def _seals(run_dir: Path) -> Iterator[str]:
    seals: dict[tuple[str, int], str] = {}
    configs: dict[str, str] = {}  # manifest of a checkpoint -> digest of the run's configuration
    try:
        for step, name, digest in read_seals(run_dir):
            seals[name, 0 if name == CONFIG else step] = digest  # it is written at each start
            if name.startswith(CHECKPOINTS) and (CONFIG, 0) in seals:
                configs.setdefault(name, seals[CONFIG, 0])
    except ValueError as error:
        yield str(error)
        return
    if not seals:
        yield f"{run_dir} has no seals: a release before them wrote it"
    path = run_dir / _METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    digests = Counter(hashlib.sha256(line).hexdigest() for line in lines)
    for (name, step), digest in seals.items():
        if name.startswith(CHECKPOINTS) and not (run_dir / name).parent.exists():
            continue  # removed for newer ones
        if name == _METRICS:
            digests[digest] -= 1
            if digests[digest] < 0:
                yield f"step {step}: the line of {name} has changed since it was written"
        elif not (run_dir / name).is_file():
            yield f"step {step}: {name} is missing"
        elif sha256_of(run_dir / name) != digest:
            yield f"step {step}: {name} has changed since it was written"
    for name, digest in configs.items():
        copy = (run_dir / name).with_name(CONFIG)
        if copy.exists() and sha256_of(copy) != digest:
            yield f"{copy.relative_to(run_dir)} is not the configuration that the run had then"
    if any(count > 0 for count in digests.values()):
        yield f"{_METRICS} has a line that was not written by the run"
    sealed = {name for name, _ in seals}
    for file in sorted((run_dir / DIRECTORY).glob("*.parquet")):
        if f"{DIRECTORY}/{file.name}" not in sealed:
            yield f"{DIRECTORY}/{file.name} was not written by the run"


def _checkpoints(run_dir: Path, metrics: Mapping[int, Record]) -> Iterator[str]:
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=1)
    for step in checkpoints.steps():
        try:
            kept = checkpoints.at(step, to="resume", contents=False)
            check_manifest(kept.policy_directory.parent)
        except (DamageError, RunDirectoryError) as error:
            yield f"step {step}: {error}"
            continue
        record = metrics.get(step, {})
        for name, value in kept.metrics.items():
            logged = record.get(name, math.nan)
            if not (math.isfinite(value) or math.isfinite(logged)):
                continue
            # These grow until they are logged.
            if value > logged if name in ("time/save_s", "time/step_s") else value != logged:
                yield f"step {step}: {name} is {value} in its checkpoint, and {logged} is logged"


def _versions(recorded: RecordedStep, step: int) -> Iterator[str]:
    """Nothing is sampled from weights that were not there yet."""
    for group in recorded.groups:
        for trajectory in group.trajectories:
            for sample in trajectory.samples:
                found = sample.weight_versions
                if found is not None and not 0 <= found[0] <= found[1] < step:
                    yield (
                        f"task {trajectory.task.task_id!r} was sampled from weights {found[0]} to "
                        f"{found[1]}, and the step began with {step - 1}"
                    )


def _batch(
    recorded: RecordedStep,
    step: int,
    config: Config,
    estimator: FoundEstimator,
    metrics: dict[str, float],
) -> Iterator[str]:
    """The estimator's advantages, of the recorded rewards, where it needs nothing else.

    Args:
        metrics: Gets those of the batch.
    """
    algorithm = config.algorithm
    if (
        estimator.needs_values
        or estimator.needs_greedy
        or algorithm.reward_kl.coef
        or algorithm.dynamic_sampling is not None  # trains on groups of other steps too
    ):
        return
    try:
        batch = make_batch(recorded.groups, estimator, version=step - 1)
    except (NoGroupLeftError, ValueError) as error:
        yield str(error)
        return
    metrics |= batch.metrics()
    stale = np.concatenate([s.flags_at_loss_tokens("stale") for s in batch.sequences])
    computed = ~np.isnan(recorded.of_tokens("policy_logprobs"))
    if len(stale) == len(computed) and computed.any():  # as the mismatch is measured
        metrics[STALE_TOKENS] = float(stale[computed].mean())
    expected = np.concatenate([s.at_loss_tokens("advantages") for s in batch.sequences])
    found = recorded.of_tokens("advantages")
    if not np.array_equal(expected.astype(np.float32), found):
        yield "the advantages are not those of the rewards"


def _from_trajectories(recorded: RecordedStep) -> dict[str, float]:
    members = [each for group in recorded.groups for each in group.trajectories]
    found = rollout_metrics(members)
    ours, theirs = recorded.of_tokens("policy_logprobs"), recorded.of_tokens("logprobs")
    computed = ~np.isnan(ours)
    if len(ours) == len(theirs) and computed.any():
        difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))[computed]
        found[f"{MISMATCH}_max"] = float(difference.max())
    found.pop(TOOL_RATE, None)  # it follows from messages
    return found


def _metrics(found: Mapping[str, float], record: Mapping[str, float]) -> Iterator[str]:
    for name, value in found.items():
        if name not in record or math.isnan(record[name]):
            continue
        if not math.isclose(record[name], value, rel_tol=1e-6, abs_tol=1e-9):
            yield f"{name} is {record[name]}, and its trajectories give {value}"


def _time_shares(record: Record) -> Iterator[str]:
    for prefix in (SERVER_TIME, RANK_TIME):
        shares = [value for name, value in record.items() if name.startswith(prefix)]
        if shares and not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
            yield f"the shares of {prefix}* are {sum(shares)} together, not 1"


def _repeated(recorded: RecordedStep, times: Counter[tuple[str, int]], epoch: int) -> Iterator[str]:
    """Every attempt of a row is in an epoch once."""
    for row in recorded.rows:
        key = row["task_id"], row["rollout_index"]
        times[key] += 1
        if times[key] > epoch + 1:
            yield f"attempt {key[1]} of task {key[0]!r} is there {times[key]} times"
