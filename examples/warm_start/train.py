"""The warm start: trains a demo's checkpoint from nothing, with our own fine-tuning.

One policy, one cosine schedule, the stages of demonstrations of a `Recipe`: copy digits into calls
on short sequences, do so under the rollout's prompt, then take on the habit of guessing half of the
time. The order matters: a model that met the long prompt first learned the format and not the
digits.

What is written is rounded to bfloat16, and measured as written. Invariant: with one seed and one
number of threads, one machine writes the same bytes again.

    python -m warm_start.train calculator --out DIR

Runs in one process.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from calculator.recipe import CALCULATOR
from math_expression.recipe import MATH_EXPRESSION
from treadle.agent_loop import ChatRenderer, Origin
from treadle.agent_loop.hf import HfRenderer
from treadle.policy.backend import PolicyBackend
from treadle.policy.backends.hf_weights import write_folder
from treadle.policy.backends.megatron.backend import MegatronPolicy
from treadle.policy.client.types import NamedTensor, TrainSequence
from treadle.policy.config.policy import OptimizerConfig, PolicyConfig
from treadle.trainer.sft import Demonstration, fine_tune, train_sequences, transcribe
from warm_start.recipe import Recipe
from warm_start.tokenizer import (
    END_OF_TEXT,
    IM_END,
    MAX_POSITIONS,
    VOCAB_SIZE,
    build_tokenizer,
    write_tokenizer,
)

__all__ = ["RECIPES", "Skill", "main", "measure", "warm_start"]

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {"calculator": CALCULATOR, "math_expression": MATH_EXPRESSION}
)
"""By the name of the demo."""

NUM_MEASURED: Final = 480
_MEASURE_SEED: Final = 4

_log = logging.getLogger("warm_start.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """What a policy does with held-out questions, computed and not sampled: it has no noise.

    Attributes:
        call_rate: Mean probability, at temperature 1, that every turn which should open with a
            tool call does so.
        right_when_calling: Probability, at temperature 1, that all calls and the answer after
            them are exactly right.
        greedy_accuracy: Share of questions where calling, and every token of a right answer, has
            a probability above one half, so that greedy decoding takes it: a lower bound.
        greedy_when_calling: The same without the decisions to call.
    """

    call_rate: float
    right_when_calling: float
    greedy_accuracy: float
    greedy_when_calling: float


def measure(
    policy: PolicyBackend, renderer: ChatRenderer, demonstrations: Iterable[Demonstration]
) -> Skill:
    """Scores demonstrations of full reward, token by token; collective like the policy.

    A turn's first token is the decision to call or to answer; of the last turn it belongs to the
    answer.
    """
    ledgers = [ledger for each in demonstrations for ledger in transcribe(renderer, each)]
    scored = policy.logprobs(train_sequences(ledgers))
    calling, saying = [], []
    for ledger, logprobs in zip(ledgers, scored, strict=True):
        turns = [span.start for span in ledger.spans if span.origin is Origin.SAMPLED]
        said = [index for index, sampled in enumerate(ledger.loss_mask) if sampled]
        calling.append([logprobs[index] for index in turns[:-1]])
        saying.append([logprobs[index] for index in said if index not in turns[:-1]])
    calls = [math.exp(sum(decisions)) for decisions in calling]
    rights = [math.exp(sum(tokens)) for tokens in saying]
    majority = math.log(0.5)
    sure = [min(tokens) > majority for tokens in saying]
    eager = [min(decisions) > majority for decisions in calling]
    return Skill(
        call_rate=statistics.fmean(calls),
        right_when_calling=statistics.fmean(rights, weights=calls),
        greedy_accuracy=statistics.fmean(a and b for a, b in zip(sure, eager, strict=True)),
        greedy_when_calling=statistics.fmean(sure),
    )


def warm_start(
    recipe: Recipe, out: Path, *, seed: int = 0, num_measured: int = NUM_MEASURED
) -> Skill:
    """Makes a demo's model and data.

    Args:
        recipe: Of the demo.
        out: A new folder: `model/` and the recipe's data files are written into it.
        seed: Of the initial weights and of the demonstrations.
        num_measured: Held-out questions to measure the skill on.

    Returns:
        The skill of the model as written, on held-out questions.

    Raises:
        FileExistsError: `out` exists.
    """
    out.mkdir(parents=True)
    for name, rows in recipe.rows().items():
        with (out / name).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    with tempfile.TemporaryDirectory() as scratch:
        blank = Path(scratch) / "blank"
        _write_blank_model(blank, recipe, seed)
        renderer = HfRenderer.from_directory(blank)
        _train(blank, out / "model", _batches(renderer, recipe, seed), recipe)
    rng = random.Random(_MEASURE_SEED)
    held_out = [recipe.held_out(rng, recipe.tool) for _ in range(num_measured)]
    policy = MegatronPolicy(PolicyConfig(), out / "model")
    try:
        return measure(policy, renderer, held_out)
    finally:
        policy.close()


def _train(
    blank: Path,
    folder: Path,
    batches: Iterable[Sequence[TrainSequence]],
    recipe: Recipe,
) -> None:
    """One optimizer over all stages; `folder` gets the result in bfloat16."""
    num_steps = sum(stage.num_steps for stage in recipe.stages)
    policy = MegatronPolicy(PolicyConfig(optimizer=_optimizer(num_steps)), blank)
    try:
        for stats in fine_tune(policy, batches):
            if stats.step % 25 == 0 or stats.step == num_steps:
                _log.info(
                    "step %d/%d loss %.4f nats, %.0f tokens/s",
                    stats.step,
                    num_steps,
                    stats.loss,
                    stats.num_tokens / stats.time_s,
                )
        rounded = (
            NamedTensor(name=weight.name, tensor=weight.tensor.to(torch.bfloat16))
            for weight in policy.export_weights()
        )
        write_folder(rounded, folder, like=blank)
    finally:
        policy.close()


def _optimizer(num_steps: int) -> OptimizerConfig:
    return OptimizerConfig(
        lr=3e-3,
        warmup_steps=min(20, num_steps // 2),
        schedule="cosine",
        decay_steps=num_steps,
        min_lr=3e-5,
        weight_decay=0.01,
        beta2=0.95,
    )


def _batches(renderer: ChatRenderer, recipe: Recipe, seed: int) -> Iterator[list[TrainSequence]]:
    rng = random.Random(seed)
    for stage in recipe.stages:
        _log.info("stage %s: %d steps of %d", stage.name, stage.num_steps, stage.batch_size)
        for _ in range(stage.num_steps):
            yield [
                sequence
                for _ in range(stage.batch_size)
                for sequence in train_sequences(
                    transcribe(renderer, stage.demonstrate(rng, recipe.tool))
                )
            ]


def _write_blank_model(folder: Path, recipe: Recipe, seed: int) -> None:
    """A model folder with untrained weights: 919,680 parameters in Qwen2's architecture."""
    tokenizer = build_tokenizer(recipe)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(IM_END),
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["dtype"] = "bfloat16"  # what the trained weights will be rounded to
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    write_tokenizer(folder, recipe)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a demo's checkpoint.")
    parser.add_argument("demo", choices=RECIPES, help="whose checkpoint and data to make")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stdout)
    _log.setLevel(logging.INFO)
    try:
        skill = warm_start(RECIPES[arguments.demo], arguments.out, seed=arguments.seed)
    except FileExistsError as error:
        parser.error(f"--out {arguments.out}: {error.strerror}; name a folder that does not exist")
    sys.stdout.write(
        f"{NUM_MEASURED} held-out questions, weights in bfloat16\n"
        f"tool-call rate at temperature 1      {skill.call_rate:.3f}\n"
        f"right at temperature 1, when calling {skill.right_when_calling:.4f}\n"
        f"greedy accuracy (lower bound)        {skill.greedy_accuracy:.3f}\n"
        f"greedy accuracy, when calling        {skill.greedy_when_calling:.4f}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
