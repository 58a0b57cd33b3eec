"""Training step with shared prefixes: tokens per second against the same step packed flat.

Groups as in the demo: 8 samples of one prompt, 167 prompt and 44 response tokens, nothing in common
between groups unless `--common` says so. All sides take the same step on the same batch, and the
same logical tokens are counted for all: a prompt counts once per sample. Transformers takes the
batch padded (`train_step.py`). Steps of all sides alternate, and ratios are taken within each
round, of processor time: what other processes do on a shared machine changes it least. Wall time is
given beside it::

    ./pants run benchmarks/shared_prefixes.py -- --rounds 9
    ./pants run benchmarks/shared_prefixes.py -- --forks 3 --json results.json

`--forks` makes the samples conversations of several turns that part after each turn, so that the
tree has that many levels.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from train_step import LR, SHAPES, TransformersTrainer

from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.client.types import SharePrefixes, TrainSequence
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig


def make_groups(
    groups: int, samples: int, prompt: int, response: int, common: int, forks: int, vocab: int
) -> list[TrainSequence]:
    """Random ids; responses differ in length by up to 20 % in both directions.

    Args:
        groups: Number of prompts.
        samples: Number of samples per prompt.
        prompt: Tokens of a prompt.
        response: Mean tokens of a response.
        common: First tokens that all prompts share.
        forks: Levels at which the samples of a group part: 1, right after the prompt.
        vocab: Ids are below it.
    """
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab) for _ in range(count))

    start = ids(common)
    batch = []
    for _ in range(groups):
        stems = [start + ids(prompt - common)]
        for level in range(1, forks):
            width = max(1, samples * level // forks)
            stems = [stems[i % len(stems)] + ids(response // forks) for i in range(width)]
        for i in range(samples):
            length = prompt + round(response * draw.uniform(0.8, 1.2))
            stem = stems[i % len(stems)]
            batch.append(
                TrainSequence(
                    ids=stem + ids(max(1, length - len(stem))),
                    loss_mask=(False,) * prompt + (True,) * (max(length, len(stem) + 1) - prompt),
                    advantages=draw.gauss(0.0, 1.0),
                )
            )
    return batch


def measure(step: Callable[[], object]) -> dict[str, float]:
    """Seconds of one step, of the processors and on the wall."""
    began, cpu = time.perf_counter(), time.process_time()
    step()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - began}


def main() -> None:
    """Prints tokens per second of each side and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=167)
    parser.add_argument("--response", type=int, default=44)
    parser.add_argument("--common", type=int, default=0)
    parser.add_argument("--forks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[args.model], tie_word_embeddings=True)
    batch = make_groups(
        args.groups,
        args.samples,
        args.prompt,
        args.response,
        args.common,
        args.forks,
        config.vocab_size,
    )
    tokens = sum(len(sequence.ids) for sequence in batch)
    loss = ClippedSurrogate()
    with tempfile.TemporaryDirectory() as name:
        transformers.LlamaForCausalLM(config).save_pretrained(name)
        theirs = TransformersTrainer(Path(name), batch)
        policy = MegatronPolicy(PolicyConfig(optimizer=OptimizerConfig(lr=LR)), Path(name))

    def ours(mode: SharePrefixes) -> Callable[[], object]:
        def step() -> None:
            policy.planner.share_prefixes = mode
            policy.train_step(batch, loss)

        return step

    sides = {
        "shared": ours("auto"),
        "packed": ours("never"),
        "transformers": theirs.padded,
    }
    for step in sides.values():
        step()
    rounds = [{side: measure(step) for side, step in sides.items()} for _ in range(args.rounds)]
    policy.close()
    load = os.getloadavg()[0]
    print(
        f"{args.groups} groups of {args.samples} samples, {tokens} tokens, {args.threads} threads, "
        f"{args.rounds} rounds, load {load:.1f}"
    )
    for side in sides:
        speed = tokens / statistics.median(r[side]["cpu_s"] for r in rounds)
        line = f"{side:14s} {speed:8.0f} tokens per CPU second"
        for clock in ("cpu_s", "wall_s"):
            ratios = sorted(r[side][clock] / r["shared"][clock] for r in rounds)
            line += f"; {clock} x{statistics.median(ratios):.2f} "
            line += f"[{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        print(line)
    if args.json:
        args.json.write_text(json.dumps({"tokens": tokens, "load": load, "rounds": rounds}))


if __name__ == "__main__":
    main()
