"""Tokens per second of the torch engine and of transformers, same shapes, same run.

The workload is that of the calculator demo: groups of samples share a prompt, all prompts share a
system prefix, and every sequence has a second turn that extends its first by a tool result. The
model has random weights and, unless `--model` says otherwise, the demo's size. Every completion
has the same number of tokens, which favours `generate`: it never waits for a straggler.

    python benchmarks/engine_throughput.py [--rounds 3] [--threads 2] [--sequences 64]
        [--model 0.5b --device cuda --dtype bfloat16]

`generate` runs each turn as one left-padded batch with its own cache, the engine and transformers'
continuous batching as concurrent requests, the second turn of each as soon as its first has ended.
They take turns, so a noisy machine affects all. The output is the median and range over the rounds,
and those of the ratio per round, per second and per second of CPU time, which other processes
disturb less. Log-probabilities are requested of the engine and of continuous batching.
"""

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from train_step import SHAPES
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen2Config,
)

from treadle.rollout_server.engine import ElementType, EngineRequest, Sampling, Started, Tokens
from treadle.rollout_server.engines.torch import ModelSource, TorchEngine

SYSTEM_TOKENS, QUESTION_TOKENS, RESULT_TOKENS, COMPLETION_TOKENS = 140, 40, 15, 30
GROUP_SIZE = 8
PAGE_TOKENS = 32
SUBJECTS = ("generate", "continuous batching", "engine")
VOCAB_SIZE = 1050


class _Times(NamedTuple):
    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> "_Times":
        return cls(time.perf_counter(), time.process_time())


def write_model(directory: Path, shape: str) -> None:
    """Writes a model with random weights, of a shape of `train_step`."""
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=1024, tie_word_embeddings=True)
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)


def prompts_of(num_sequences: int, seed: int) -> list[list[int]]:
    """Returns first-turn prompts: one system prefix, one question per group."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return [int(x) for x in torch.randint(4, VOCAB_SIZE, (length,), generator=generator)]

    system = draw(SYSTEM_TOKENS)
    groups = [
        system + draw(QUESTION_TOKENS - g % 5) for g in range(-(-num_sequences // GROUP_SIZE))
    ]
    return [groups[i // GROUP_SIZE] for i in range(num_sequences)]


def second_turn(prompt: Sequence[int], completion: Sequence[int]) -> list[int]:
    """Returns the next prompt: the conversation, and a tool result that depends on the question."""
    return [*prompt, *completion, *[4 + (prompt[-1] + i) % 1000 for i in range(RESULT_TOKENS)]]


def run_generate(model: Any, prompts: list[list[int]]) -> int:
    """Runs both turns with `generate`; returns the number of sampled tokens."""
    sampled = 0
    for turn in range(2):
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(p)) + p for p in prompts]
        ids = torch.tensor(rows, device=model.device)
        shown = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
        mask = torch.tensor(shown, device=model.device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                min_new_tokens=COMPLETION_TOKENS,
                max_new_tokens=COMPLETION_TOKENS,
                pad_token_id=0,
            )
        completions = out[:, longest:].tolist()
        sampled += sum(map(len, completions))
        if turn == 0:
            prompts = [second_turn(p, c) for p, c in zip(prompts, completions, strict=True)]
    return sampled


def run_continuous(manager: Any, prompts: list[list[int]]) -> int:
    """Runs both turns with continuous batching; returns the number of sampled tokens."""
    sampled = 0
    waiting = {f"{index}/0": prompt for index, prompt in enumerate(prompts)}
    for name, prompt in waiting.items():
        manager.add_request(prompt, request_id=name, max_new_tokens=COMPLETION_TOKENS)
    while waiting:
        result = manager.get_result(timeout=60)
        if result is None or result.error is not None:
            raise RuntimeError(f"continuous batching ended: {result}")
        if not result.is_finished():
            continue
        sampled += len(result.generated_tokens)
        prompt = waiting.pop(result.request_id)
        index, _, turn = result.request_id.partition("/")
        if turn == "0":
            waiting[name := f"{index}/1"] = second_turn(prompt, result.generated_tokens)
            manager.add_request(waiting[name], request_id=name, max_new_tokens=COMPLETION_TOKENS)
    return sampled


@contextmanager
def continuous_batching(path: Path, args: argparse.Namespace) -> Iterator[Any]:
    """Yields transformers' manager over the model, with what it shares of prompts."""
    auto: Any = AutoModelForCausalLM
    model: Any = auto.from_pretrained(
        path, attn_implementation="sdpa", dtype=getattr(torch, args.dtype)
    )
    make_settings: Any = GenerationConfig
    settings = make_settings(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        return_logprobs=True,
        num_blocks=-(-2 * args.sequences * 320 // PAGE_TOKENS),
        page_size=PAGE_TOKENS,
        max_batch_tokens=2048,
    )
    with (
        model.to(args.device)
        .eval()
        .continuous_batching_context_manager(
            settings, continuous_batching_config=batching
        ) as manager
    ):
        yield manager


async def run_engine(engine: TorchEngine, prompts: list[list[int]]) -> tuple[int, int, int]:
    """Runs both turns; returns the numbers of sampled, prompt and cached prompt tokens."""

    async def complete(prompt: list[int], name: str) -> tuple[list[int], int]:
        sampling = Sampling(max_tokens=COMPLETION_TOKENS, ignore_eos=True)
        request = EngineRequest(
            request_id=name, prompt=tuple(prompt), sampling=sampling, logprobs=True
        )
        ids: list[int] = []
        cached = 0
        async for event in engine.generate(request):
            if isinstance(event, Started):
                cached = event.cached_prompt_tokens
            elif isinstance(event, Tokens):
                ids += event.token_ids
        return ids, cached

    async def trajectory(index: int, prompt: list[int]) -> tuple[int, int, int]:
        first, first_cached = await complete(prompt, f"{index}/0")
        longer = second_turn(prompt, first)
        second, second_cached = await complete(longer, f"{index}/1")
        read = len(prompt) + len(longer)
        return len(first) + len(second), read, first_cached + second_cached

    counts = await asyncio.gather(*[trajectory(i, p) for i, p in enumerate(prompts)])
    sampled, read, cached = (sum(column) for column in zip(*counts, strict=True))
    return sampled, read, cached


def spread(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """Median and range."""
    middle, low, high = (form.format(f(values)) for f in (statistics.median, min, max))
    return f"{middle} ({low} to {high})"


async def measure(path: Path, args: argparse.Namespace) -> dict[str, object]:
    """Runs the rounds; returns the report."""
    auto: Any = AutoModelForCausalLM
    dtype = ElementType(args.dtype)
    model: Any = auto.from_pretrained(
        path, attn_implementation="sdpa", dtype=getattr(torch, args.dtype)
    )
    model = model.to(args.device).eval()
    engine = await TorchEngine.load(
        ModelSource(path=path, dtype=dtype, device=args.device),
        max_num_seqs=args.sequences,
        prefix_cache_bytes=512 << 20,
        num_threads=args.threads,
    )
    rates: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    cpu_rates: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    cached_share = 0.0

    def note(name: str, began: _Times, ended: _Times, sampled: int) -> None:
        rates[name].append(sampled / (ended.wall_s - began.wall_s))
        cpu_rates[name].append(sampled / (ended.cpu_s - began.cpu_s))

    async with AsyncExitStack() as stack:
        stack.push_async_callback(engine.aclose)
        torch.set_num_threads(args.threads)
        manager = stack.enter_context(continuous_batching(path, args))
        for number in range(-1, args.rounds):  # The first round is a warm-up.
            prompts = prompts_of(args.sequences, seed=number + 1)
            began = _Times.now()
            generated = await asyncio.to_thread(
                _with_threads, args.threads, run_generate, model, prompts
            )
            first = _Times.now()
            batched = await asyncio.to_thread(run_continuous, manager, prompts)
            second = _Times.now()
            counts = await run_engine(engine, prompts)
            ended = _Times.now()
            if number >= 0:
                note("generate", began, first, generated)
                note("continuous batching", first, second, batched)
                note("engine", second, ended, counts[0])
                cached_share = counts[2] / counts[1]
    return {
        "sequences": args.sequences,
        "threads": args.threads,
        "tokens_per_s": rates,
        "tokens_per_cpu_s": cpu_rates,
        "cached_prompt_share": cached_share,
    }


def _with_threads(num_threads: int, function: Callable[..., int], *args: object) -> int:
    torch.set_num_threads(num_threads)
    return function(*args)


def main() -> None:
    """Parses the arguments, runs the rounds, prints the report and optionally writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="tiny", help="of `train_step`")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both sides")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), args.model)
        result = asyncio.run(measure(Path(directory), args))
    print(
        f"{args.sequences} sequences, 2 turns of {COMPLETION_TOKENS} tokens, {args.threads} threads"
    )
    for unit in ("tokens_per_s", "tokens_per_cpu_s"):
        rates: Any = result[unit]
        print(f"  {unit}")
        for name in SUBJECTS:
            ratios = [e / g for e, g in zip(rates["engine"], rates[name], strict=True)]
            of_engine = spread(ratios, "{:.2f}")
            print(f"    {name:20} {spread(rates[name])}; the engine's over it {of_engine}")
    print(f"  prompt tokens cached   {result['cached_prompt_share']:.0%}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
