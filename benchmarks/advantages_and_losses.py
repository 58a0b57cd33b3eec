"""The time and memory of advantages and losses, up to 65,536 trajectories of 4,096 tokens.

Each advantage is computed by the driver at once, from one reward per trajectory in groups of 8;
gae, which needs numbers per token, in chunks of 512 trajectories. Each loss is computed with its
gradient in chunks of 16 trajectories, 65,536 tokens, from random log-probabilities that are made
for the chunk, so that no more than a chunk is in memory. Every measurement runs in a process of its
own, which reports its own peak: the resident memory above that after the imports.

Time is linear if the time per token is the same for each number of trajectories: the last column is
that of the largest number divided by that of the smallest.

    ./pants run benchmarks/advantages_and_losses.py -- [--rounds 3] [--largest 65536]
"""

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from treadle.policy.algorithms.advantages import Outcomes
from treadle.policy.algorithms.choose_loss import policy_loss
from treadle.policy.algorithms.estimators import find_estimator
from treadle.policy.algorithms.gae import gae
from treadle.policy.backend import LossInputs
from treadle.policy.config.algorithm import AlgorithmConfig

_TOKENS, _GROUP, _CHUNK, _GAE_CHUNK = 4096, 8, 16, 512
_ADVANTAGES = ("grpo", "rloo", "opo", "reinforce_plus_plus", "maxrl", "gae")
_LOSSES = ("ppo", "gspo", "gmpo", "cispo", "dppo_tv")


def _advantages(name: str, count: int) -> None:
    """Computes the advantages of `count` trajectories."""
    draw = np.random.default_rng(0)
    if name == "gae":
        size = min(count, _GAE_CHUNK)
        lengths, mask = np.full(size, _TOKENS), np.ones(size * _TOKENS, bool)
        for _ in range(count // size):
            rewards, values = draw.random((2, size * _TOKENS))
            gae(rewards, values, mask, lengths, gamma=0.99, lam=0.95)
        return
    outcomes = Outcomes(
        rewards_N=draw.integers(0, 2, count).astype(np.float64),
        groups_N=np.arange(count) // _GROUP,
        trajectories_S=np.arange(count),
        tokens_S=np.full(count, _TOKENS),
    )
    find_estimator(AlgorithmConfig(advantage=name))(outcomes)


def _losses(name: str, count: int) -> None:
    """Computes the loss and the gradient of `count` trajectories, a chunk at a time."""
    loss = policy_loss(AlgorithmConfig(loss=name))
    draw = torch.Generator().manual_seed(0)
    tokens = _CHUNK * _TOKENS
    for _ in range(count // _CHUNK):
        old = torch.rand(tokens, generator=draw).sub_(2.0)
        logprobs = torch.rand(tokens, generator=draw).mul_(0.2).add_(old).requires_grad_()
        output = loss(
            LossInputs(
                logprobs_T=logprobs,
                entropy_T=torch.zeros(tokens),
                advantages_T=torch.randn(_CHUNK, generator=draw).repeat_interleave(_TOKENS),
                old_logprobs_T=old,
                rollout_logprobs_T=old,
                ref_logprobs_T=None,
                stale_T=torch.zeros(tokens, dtype=torch.bool),
                sample_lengths_S=torch.full((_CHUNK,), _TOKENS),
            )
        )
        output.loss_T.sum().backward()


def _measured(kind: str, name: str, count: int) -> tuple[float, float]:
    """Returns (processor seconds, MB above the start) of one measurement in its own process."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_one, args=(there, kind, name, count)
    )
    process.start()
    seconds, megabytes = here.recv()
    process.join()
    return seconds, megabytes


def _one(result: Connection, kind: str, name: str, count: int) -> None:
    work: Callable[[str, int], None] = _advantages if kind == "advantage" else _losses
    torch.set_num_threads(1)
    before = _resident()
    work(name, _CHUNK)
    began = time.process_time()
    work(name, count)
    seconds = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.send((seconds, max(0, peak - before) / 1e6))


def _resident() -> int:
    """Returns the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def _spread(values: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return " ".join(
        (f"{middle * scale:.{digits}f}", f"({low * scale:.{digits}f} to {high * scale:.{digits}f})")
    )


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=int, default=65536, help="trajectories")
    parser.add_argument("--only", nargs="*", help="names of advantages and losses")
    options = parser.parse_args()
    counts = (options.largest // 4, options.largest)
    print(f"| | seconds for {counts[1]} trajectories | ns a token | MB | time per token, x 4 |")
    print("|---|---|---|---|---|")
    named = [*(("advantage", n) for n in _ADVANTAGES), *(("loss", n) for n in _LOSSES)]
    for kind, name in named:
        if options.only and name not in options.only:
            continue
        rounds = [[_measured(kind, name, n) for n in counts] for _ in range(options.rounds)]
        seconds = [large[0] for _, large in rounds]
        ratios = [large[0] / small[0] / 4 for small, large in rounds]
        memory = max(large[1] for _, large in rounds)
        a_token = _spread(seconds, 1e9 / counts[1] / _TOKENS)
        cells = (f"{kind} `{name}`", _spread(seconds), a_token, f"{memory:.0f}", _spread(ratios))
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
