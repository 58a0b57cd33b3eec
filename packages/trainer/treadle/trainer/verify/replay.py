"""Computes the steps of a run again, from its recorded trajectories.

The policy ranks start as in the run, with its parallel sizes and its number of threads. Each step's
batch is made of the recorded trajectories by the code that trains; the update then gives the
log-probabilities, entropies and metrics that the run recorded, and the weights of its checkpoints,
bit for bit on the machine and versions that it ran on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import pickletools
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.client.group import PolicyGroup
from treadle.policy.client.types import TokenValues
from treadle.policy.config.settings import to_json
from treadle.policy.v1 import training_service_pb2 as pb
from treadle.policy.v1.checkpoint_service_pb2 import LoadRequest, SaveHfRequest, SaveRequest
from treadle.tracing.trajectories import DIRECTORY, image_bytes
from treadle.trainer.checkpoint.run_directory import (
    CHECKPOINTS,
    HF,
    POLICY,
    Checkpoint,
    Checkpoints,
)
from treadle.trainer.config.schema import Config
from treadle.trainer.launch.environment import cpu_count
from treadle.trainer.launch.local import LocalLauncher
from treadle.trainer.launch.policy_group import policy_group
from treadle.trainer.model_source import with_local_model
from treadle.trainer.plan import policy_threads
from treadle.trainer.report.metrics import MFU, RANK_RATE, Record
from treadle.trainer.training_loop.groups import survivors_of
from treadle.trainer.training_loop.update_metrics import update_metrics
from treadle.trainer.verify.quick import train_file
from treadle.trainer.verify.recorded import RecordedStep, read_step

__all__ = ["CannotReplayError", "replay_problems"]

_OF_MACHINE = (RANK_RATE, MFU, "policy/memory_")
"""Beside times, metrics that differ from one computation to the next."""


class CannotReplayError(ValueError):
    """The run has what its trajectory files do not; the message names the setting."""


def _check_replayable(run_dir: Path, config: Config) -> None:
    """Raises if the recorded trajectories are not enough.

    Raises:
        CannotReplayError: They are not.
    """
    algorithm, rollout = config.algorithm, config.rollout
    estimator = find_estimator(algorithm)
    for key, used in (
        (f"algorithm.advantage={algorithm.advantage}", estimator.needs_values),
        (f"algorithm.advantage={algorithm.advantage}", estimator.needs_greedy),
        (f"algorithm.reward_kl.coef={algorithm.reward_kl.coef}", algorithm.reward_kl.coef > 0),
        ("algorithm.reference_addresses", bool(algorithm.reference_addresses)),
        ("algorithm.dynamic_sampling", algorithm.dynamic_sampling is not None),
        ("policy.moe.routing_replay", config.policy.moe.routing_replay),
        (rollout.truncation or "", rollout.truncation is not None),
        (f"images in {DIRECTORY}", image_bytes(run_dir / DIRECTORY) > 0),
    ):
        if used:
            raise CannotReplayError(
                f"{key}: trajectory files do not have all that its steps were computed from; "
                "leave out --replay"
            )


async def replay_problems(
    run_dir: Path,
    config: Config,
    metrics: Mapping[int, Record],
    *,
    after: int = 0,
    bound: float = 0.0,
) -> AsyncGenerator[tuple[int, list[str]], None]:
    """Yields each step with what does not fit; the first step that has any is the last.

    Args:
        after: Begin with the checkpoint of this step; 0: with `model.path`.
        bound: Largest difference of a log-probability or entropy, in nats; a metric may differ by
            the same share. 0: bit for bit.

    Raises:
        CannotReplayError: The run cannot be replayed.
        PolicyError: A policy rank failed.
        ProcessError: A rank did not start.
        RunDirectoryError: The checkpoint to begin with is damaged or missing.
        SetupError: The model that the run began with is not there.
    """
    _check_replayable(run_dir, config)
    estimator = find_estimator(config.algorithm)
    checkpoints = Checkpoints(run_dir / CHECKPOINTS, keep=1)
    local = await asyncio.to_thread(with_local_model, config)
    async with contextlib.AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-verify-")))
        policy = await stack.enter_async_context(_policy(local, scratch / "logs"))
        if after:
            begin = checkpoints.at(after, to="resume")
            await policy.call(LoadRequest(directory=str(begin.policy_directory.absolute())))
        request = pb.UpdateRequest(
            algorithm=to_json(config.algorithm), temperature=config.rollout.temperature
        )
        kept = set(checkpoints.steps())
        for step in sorted(each for each in metrics if each > after):
            recorded = await asyncio.to_thread(read_step, run_dir / train_file(step))
            if not recorded.is_whole:
                raise CannotReplayError(
                    f"step {step}: {train_file(step)} lacks trajectories, as "
                    f"run.trajectories_max_bytes={config.run.trajectories_max_bytes} was reached"
                )
            survivors = survivors_of(recorded.groups, estimator, version=step - 1)
            batch = survivors.batch(estimator)
            response = (await policy.call(request, batch.sequences))[0]
            problems = [
                *_tokens(recorded, TokenValues.of(response.tokens), bound),
                *_metrics(update_metrics(response), metrics[step], bound),
            ]
            if step in kept and bound:  # differences are not to add up
                saved = checkpoints.at(step, to="resume")
                await policy.call(LoadRequest(directory=str(saved.policy_directory.absolute())))
            elif step in kept:
                saved = checkpoints.at(step, to="resume")
                problems += await _state(policy, saved, scratch / f"step-{step}")
            yield step, problems
            if problems:
                return


@contextlib.asynccontextmanager
async def _policy(config: Config, logs: Path) -> AsyncIterator[PolicyGroup]:
    threads = policy_threads(config, cpu_count())
    async with (
        LocalLauncher(logs) as launcher,
        policy_group(config, launcher, threads=threads) as policy,
    ):
        yield policy


def _tokens(recorded: RecordedStep, computed: TokenValues, bound: float) -> Iterator[str]:
    for name, found in (
        ("policy_logprobs", computed.logprobs_M),
        ("entropy", computed.entropy_M),
    ):
        kept = recorded.of_tokens(name)
        if len(kept) != len(found):
            yield f"{len(kept)} tokens have {name}, and {len(found)} were trained on"
        elif (difference := _largest(kept, found)) > bound:
            yield f"{name} differ by up to {difference:.3g} nats from what the policy computes"


def _largest(kept: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """Returns the largest difference; infinite where only one of them is a number."""
    if not np.array_equal(np.isnan(kept), np.isnan(found)):
        return math.inf
    known = ~np.isnan(kept)
    difference = kept[known].astype(np.float64) - found[known].astype(np.float64)
    return float(np.abs(difference).max(initial=0.0))


def _metrics(computed: Mapping[str, float], record: Record, bound: float) -> Iterator[str]:
    for name, value in computed.items():
        if name.endswith("_s") or name.startswith(_OF_MACHINE) or name not in record:
            continue
        kept = record[name]
        if math.isnan(kept) and not math.isfinite(value):
            continue
        if not math.isclose(kept, value, rel_tol=bound, abs_tol=bound):
            yield f"{name} is {kept}, and the policy computes {value}"


async def _state(policy: PolicyGroup, saved: Checkpoint, scratch: Path) -> list[str]:
    """Compares the policy with a checkpoint: its files, and what a rank loads from them."""
    state, loaded, hf = scratch / POLICY, scratch / "loaded" / POLICY, scratch / HF
    loaded.parent.mkdir(parents=True)
    await policy.call(SaveRequest(directory=str(state)))
    pairs = [(state, saved.policy_directory), (state, loaded)]
    if saved.hf_directory is not None:
        await policy.call(SaveHfRequest(directory=str(hf)))
        pairs.append((hf, saved.hf_directory))
    await policy.call(LoadRequest(directory=str(saved.policy_directory.absolute())))
    await policy.call(SaveRequest(directory=str(loaded)))
    return [
        f"{kept.name}/{name} of the checkpoint is not what the policy computes"
        for ours, kept in pairs
        for name in sorted({path.name for path in (*ours.iterdir(), *kept.iterdir())})
        if not _equal(ours / name, kept / name)
    ]


def _equal(one: Path, other: Path) -> bool:
    if not (one.is_file() and other.is_file()):
        return False
    contents = one.read_bytes(), other.read_bytes()
    if one.name != ".metadata":  # of torch
        return contents[0] == contents[1]
    try:
        return _index(contents[0]) == _index(contents[1])
    except ValueError:
        return False


def _index(pickled: bytes) -> list[tuple[str, object]]:
    """Returns the instructions of torch's index that locate tensors in the other files.

    The directory and the time of writing follow them. Nothing is unpickled.

    Raises:
        ValueError: It is no pickle.
    """
    steps = ((code.name, argument) for code, argument, _ in pickletools.genops(pickled))
    index = itertools.takewhile(lambda step: step[1] != "StorageMeta", steps)
    return [step for step in index if step[0] != "FRAME"]  # a frame's length counts what follows
