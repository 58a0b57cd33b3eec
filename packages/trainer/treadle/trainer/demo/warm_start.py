"""The warm start: trains the demo's checkpoint from nothing, with our own fine-tuning.

One policy, one cosine schedule, three stages of demonstrations (see `demonstrations`): copy digits
into calls on short sequences, do so under the rollout's prompt, then take on the habit of guessing
on half of the wordings. The order is the recipe: a model that met the long prompt first learned
the format and not the digits.

What is written is rounded to bfloat16, and measured as written. Invariant: with one seed and one
number of threads, one machine writes the same bytes again.

    python -m treadle.trainer.demo.warm_start --out DIR

One process, nobody waits.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from treadle.agent_loop import ChatRenderer, ToolSpec
from treadle.agent_loop.hf import HfRenderer
from treadle.tools import load_catalogue
from treadle.trainer.config.policy import OptimizerConfig, PolicyConfig
from treadle.trainer.demo.demonstrations import answered_with_tool, drill, habit, tool_use
from treadle.trainer.demo.questions import Question, Split, dataset_rows, sample_question
from treadle.trainer.demo.tokenizer import (
    END_OF_TEXT,
    IM_END,
    MAX_POSITIONS,
    VOCAB_SIZE,
    build_tokenizer,
    write_tokenizer,
)
from treadle.trainer.hf_weights import write_folder
from treadle.trainer.megatron.backend import MegatronPolicy
from treadle.trainer.policy import NamedTensor, PolicyBackend, TrainSequence
from treadle.trainer.sft import Demonstration, fine_tune, train_sequence, transcribe

__all__ = ["CATALOGUE", "STAGES", "Skill", "Stage", "main", "measure", "warm_start"]

CATALOGUE: Final = Path(__file__).parent / "calculator" / "tools.yaml"

NUM_TRAIN_ROWS: Final = 1200
NUM_VAL_ROWS: Final = 96
_TRAIN_SEED: Final = 1
_VAL_SEED: Final = 2
NUM_MEASURED: Final = 480
_MEASURE_SEED: Final = 4

_log = logging.getLogger("treadle.trainer.demo.warm_start")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Some steps on one kind of demonstration.

    Attributes:
        name: For the log.
        demonstrate: Makes one demonstration.
        num_steps: Optimizer steps.
        batch_size: Demonstrations per step.
    """

    name: str
    demonstrate: Callable[[random.Random, ToolSpec], Demonstration]
    num_steps: int
    batch_size: int


STAGES: Final = (
    Stage(name="copy", demonstrate=drill, num_steps=320, batch_size=64),
    Stage(name="call", demonstrate=tool_use, num_steps=160, batch_size=32),
    Stage(name="habit", demonstrate=habit, num_steps=280, batch_size=32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """What a policy does with held-out questions, computed and not sampled: it has no noise.

    Attributes:
        call_rate: Mean probability that the answer opens with a tool call, at temperature 1.
        right_when_calling: Probability, at temperature 1, that a call and the answer after it
            are both exactly right.
        greedy_accuracy: Share of questions where calling, and every token of a right answer, has
            a probability above one half, so that greedy decoding takes it: a lower bound.
        greedy_when_calling: The same without the decision to call.
    """

    call_rate: float
    right_when_calling: float
    greedy_accuracy: float
    greedy_when_calling: float


def measure(
    policy: PolicyBackend, renderer: ChatRenderer, tool: ToolSpec, questions: Iterable[Question]
) -> Skill:
    """Scores the demonstration that uses the tool, token by token; collective like the policy."""
    sequences = [
        train_sequence(transcribe(renderer, answered_with_tool(question, tool)))
        for question in questions
    ]
    said = [
        [logprob for logprob, sampled in zip(scored, sequence.loss_mask, strict=True) if sampled]
        for sequence, scored in zip(sequences, policy.logprobs(sequences), strict=True)
    ]
    calls = [math.exp(logprobs[0]) for logprobs in said]
    rights = [math.exp(sum(logprobs[1:])) for logprobs in said]
    majority = math.log(0.5)
    return Skill(
        call_rate=statistics.fmean(calls),
        right_when_calling=statistics.fmean(rights, weights=calls),
        greedy_accuracy=statistics.fmean(min(logprobs) > majority for logprobs in said),
        greedy_when_calling=statistics.fmean(min(logprobs[1:]) > majority for logprobs in said),
    )


def warm_start(
    out: Path,
    *,
    seed: int = 0,
    stages: Sequence[Stage] = STAGES,
    num_measured: int = NUM_MEASURED,
) -> Skill:
    """Makes the demo's model and data.

    Args:
        out: A new folder: `model/`, `train.jsonl` and `val.jsonl` are written into it.
        seed: Of the initial weights and of the demonstrations.
        stages: What to train on.
        num_measured: Held-out questions to measure the skill on.

    Returns:
        The skill of the model as written, on held-out questions.

    Raises:
        FileExistsError: `out` exists.
    """
    out.mkdir(parents=True)
    _write_rows(out / "train.jsonl", Split.TRAIN, NUM_TRAIN_ROWS, _TRAIN_SEED)
    _write_rows(out / "val.jsonl", Split.VALIDATION, NUM_VAL_ROWS, _VAL_SEED)
    tool = load_catalogue(CATALOGUE)["calculator"].spec
    rng = random.Random(_MEASURE_SEED)
    held_out = [sample_question(rng, Split.VALIDATION) for _ in range(num_measured)]
    with tempfile.TemporaryDirectory() as scratch:
        blank = Path(scratch) / "blank"
        _write_blank_model(blank, tool, seed)
        renderer = HfRenderer.from_directory(blank)
        _train(blank, out / "model", _batches(renderer, tool, stages, seed), stages)
    policy = MegatronPolicy(PolicyConfig(), out / "model")
    try:
        return measure(policy, renderer, tool, held_out)
    finally:
        policy.close()


def _train(
    blank: Path,
    folder: Path,
    batches: Iterable[Sequence[TrainSequence]],
    stages: Sequence[Stage],
) -> None:
    """One optimizer over all stages; `folder` gets the result in bfloat16."""
    num_steps = sum(stage.num_steps for stage in stages)
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


def _batches(
    renderer: ChatRenderer, tool: ToolSpec, stages: Sequence[Stage], seed: int
) -> Iterator[list[TrainSequence]]:
    rng = random.Random(seed)
    for stage in stages:
        _log.info("stage %s: %d steps of %d", stage.name, stage.num_steps, stage.batch_size)
        for _ in range(stage.num_steps):
            yield [
                train_sequence(transcribe(renderer, stage.demonstrate(rng, tool)))
                for _ in range(stage.batch_size)
            ]


def _write_blank_model(folder: Path, tool: ToolSpec, seed: int) -> None:
    """A model folder with untrained weights: 919,680 parameters in Qwen2's architecture."""
    tokenizer = build_tokenizer(tool)
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
    write_tokenizer(folder, tool)


def _write_rows(path: Path, split: Split, num_rows: int, seed: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in dataset_rows(split, num_rows, seed=seed):
            file.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train the calculator demo's checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stdout)
    _log.setLevel(logging.INFO)
    try:
        skill = warm_start(arguments.out, seed=arguments.seed)
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
