"""Training step: tokens per second of both backends against transformers with torch's AdamW.

The same model, the same batch, the same arithmetic: on-policy clipped surrogate, token mean, norm
clipped to 1, AdamW. Transformers takes the batch padded to its longest sequence, as its users do,
or one sequence after another without padding; the policies pack. Steps of all sides alternate, so
that a busy machine slows all of them alike, and the ratio is taken within each round::

    ./pants run benchmarks/train_step.py -- --model tiny --rounds 7
    ./pants run benchmarks/train_step.py -- --model small --num_sequences 16 --spread 0.75
    ./pants run benchmarks/train_step.py -- --model 0.5b --num_sequences 16 --longest 1024 \
        --spread 0.75 --dtype bfloat16

Where torch has CUDA, all sides compute on the GPU, as the policy does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from treadle.policy.algorithms.losses import ClippedSurrogate
from treadle.policy.backends.fsdp.backend import FsdpPolicy
from treadle.policy.backends.megatron import device
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.client.types import TrainSequence
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig

LR = 1e-4
SHAPES: dict[str, dict[str, Any]] = {
    # about 1 M parameters: the model of the demo
    "tiny": {
        "vocab_size": 1056,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # about 30 M parameters, SmolLM2's proportions
    "small": {
        "vocab_size": 16384,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    # about 490 M parameters, Qwen2.5-0.5B's sizes: for a GPU
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}


def make_batch(count: int, longest: int, spread: float, vocab: int) -> list[TrainSequence]:
    """Lengths between (1 - spread) * longest and longest; the last fifth is trained on."""
    draw = random.Random(0)
    batch = []
    for _ in range(count):
        length = draw.randint(int(longest * (1.0 - spread)), longest)
        prompt = length * 4 // 5
        batch.append(
            TrainSequence(
                ids=tuple(draw.randrange(vocab) for _ in range(length)),
                loss_mask=(False,) * prompt + (True,) * (length - prompt),
                advantages=(draw.gauss(0.0, 1.0),) * length,
            )
        )
    return batch


class TransformersTrainer:
    """The same step without Megatron."""

    def __init__(
        self, folder: Path, batch: Sequence[TrainSequence], dtype: str = "float32"
    ) -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)
        )
        self._model = model.to(device.device()).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.01)
        self._rows = [self._padded([sequence]) for sequence in batch]
        self._all = self._padded(batch)
        self._num_loss_tokens = sum(sequence.num_loss_tokens for sequence in batch)

    def padded(self) -> None:
        """All sequences in one forward pass, padded to the longest."""
        self._step([self._all])

    def one_by_one(self) -> None:
        """A forward and a backward pass for each sequence, nothing padded."""
        self._step(self._rows)

    def _step(self, micro_batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._optimizer.zero_grad()
        for ids, advantages in micro_batches:
            logits = self._model(ids, use_cache=False).logits[:, :-1].float()
            logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ratio = (logp - logp.detach()).exp()
            (-(ratio * advantages[:, 1:]).sum() / self._num_loss_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    @staticmethod
    def _padded(batch: Sequence[TrainSequence]) -> tuple[torch.Tensor, torch.Tensor]:
        shape = len(batch), max(len(s.ids) for s in batch)
        ids, advantages = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for row, s in enumerate(batch):
            ids[row, : len(s.ids)] = torch.tensor(s.ids)
            masked = torch.tensor(s.advantages) * torch.tensor(s.loss_mask)
            advantages[row, : len(s.ids)] = masked
        return ids.to(device.device()), advantages.to(device.device())


class OtherProcess:
    """The FSDP policy, in a process of its own: a process has the ranks of one policy."""

    def __init__(
        self, policy: PolicyConfig, folder: str, batch: Sequence[TrainSequence], threads: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        arguments = (there, policy, folder, batch, threads)
        self._process = context.Process(target=_train_when_told, args=arguments, daemon=True)
        self._process.start()
        self._here.recv()  # it has loaded the model

    def step(self) -> None:
        """Takes one step there."""
        self._here.send("step")
        self._here.recv()

    def close(self) -> None:
        """Ends the process."""
        self._here.send("end")
        self._process.join()


def _train_when_told(
    there: Connection,
    policy: PolicyConfig,
    folder: str,
    batch: Sequence[TrainSequence],
    threads: int,
) -> None:
    torch.set_num_threads(threads)
    fsdp, loss = FsdpPolicy(policy, Path(folder)), ClippedSurrogate()
    there.send("ready")
    while there.recv() == "step":
        fsdp.train_step(batch, loss)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        there.send("done")
    fsdp.close()


def seconds(step: Callable[[], object]) -> float:
    """Wall time of one step, until the device has computed it."""
    began = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Prints tokens per second of each side and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--num_sequences", type=int, default=64)
    parser.add_argument("--longest", type=int, default=240)
    parser.add_argument("--spread", type=float, default=0.2)
    parser.add_argument("--micro_batch_tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="also write the rounds here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[args.model], tie_word_embeddings=True)
    batch = make_batch(args.num_sequences, args.longest, args.spread, config.vocab_size)
    tokens = sum(len(sequence.ids) for sequence in batch)
    with tempfile.TemporaryDirectory() as name:
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(name)
        num_parameters = sum(p.numel() for p in model.parameters())
        policy = PolicyConfig(
            optimizer=OptimizerConfig(lr=LR),
            micro_batch_tokens=args.micro_batch_tokens,
            dtype=args.dtype,
        )
        megatron = MegatronPolicy(policy, Path(name))
        fsdp = OtherProcess(policy, name, batch, args.threads)
        theirs = TransformersTrainer(Path(name), batch, args.dtype)
    loss = ClippedSurrogate()
    sides: dict[str, Callable[[], object]] = {
        "treadle, megatron": lambda: megatron.train_step(batch, loss),
        "treadle, fsdp": fsdp.step,
        "transformers, padded": theirs.padded,
        "transformers, one by one": theirs.one_by_one,
    }
    for step in sides.values():
        step()
    rounds = [{side: seconds(step) for side, step in sides.items()} for _ in range(args.rounds)]
    padding = len(batch) * max(len(s.ids) for s in batch) / tokens
    print(
        f"{num_parameters / 1e6:.1f} M parameters, {len(batch)} sequences, {tokens} tokens, "
        f"padding x{padding:.2f}, {args.threads} threads, {args.rounds} rounds"
    )
    first = next(iter(sides))
    for side in sides:
        times = [r[side] for r in rounds]
        ratios = sorted(r[side] / r[first] for r in rounds)
        print(
            f"{side:26s} {tokens / statistics.median(times):8.0f} tokens/s (best "
            f"{tokens / min(times):.0f}); {first} is x{statistics.median(ratios):.2f} "
            f"[{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        )
    if args.json is not None:
        rates = {side: [tokens / each[side] for each in rounds] for side in sides}
        args.json.write_text(json.dumps({"tokens_per_s": rates}, indent=1) + "\n")
    megatron.close()
    fsdp.close()


if __name__ == "__main__":
    main()
