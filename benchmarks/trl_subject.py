"""TRL's side of `against_trl`: its GRPOTrainer on the demo, one step per line of standard input.

Runs in an environment with TRL and without Treadle's requirements. The arithmetic of the tool and
the check of the answer are Treadle's, which import the standard library alone. Prints a line of
JSON when it is ready, and one after each step.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from treadle.tools.arithmetic import ArithmeticRefusal, evaluate, format_number
from treadle.tools.rewards.gsm8k import score

_ANSWERS = os.dup(1)  # TRL prints to standard output


def answer(value: Mapping[str, Any]) -> None:
    """Sends one line to `against_trl`."""
    os.write(_ANSWERS, (json.dumps(value) + "\n").encode())


def calculator(expression: str) -> str:
    """Evaluate arithmetic.

    Args:
        expression: What to evaluate.
    """
    try:
        return format_number(evaluate(expression))
    except ArithmeticRefusal as refusal:
        return f"Cannot evaluate: {refusal}."


def right_answer(
    completions: Sequence[Sequence[Mapping[str, Any]]], truth: Sequence[str], **_: Any
) -> list[float]:
    """Scores each trajectory's last message as the demo's reward does."""
    texts = [messages[-1].get("content") or "" for messages in completions]
    return [score(text, right) for text, right in zip(texts, truth, strict=True)]


class OneStepPerLine(TrainerCallback):
    """Begins a step when it is told to, and reports it when the trainer is back for the next.

    What TRL does between two steps, such as logging, is thus part of the first.
    """

    def __init__(self) -> None:
        self._began: tuple[float, float] | None = None
        self.trainer: Any = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Reports the last step and waits for the next line."""
        self._report()
        if not sys.stdin.readline():
            os._exit(0)  # nobody asks for more steps
        self._began = time.perf_counter(), time.process_time()

    def _report(self) -> None:
        if self._began is None:
            answer({"ready": True})
            return
        wall_s, cpu_s = (
            now - began
            for now, began in zip(
                (time.perf_counter(), time.process_time()), self._began, strict=True
            )
        )
        logged = self.trainer.state.log_history[-1]
        answer(
            {
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "reward": logged["reward"],
                "sampled_tokens": logged["completions/mean_length"],
            }
        )


def main() -> None:
    """Trains until standard input ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", type=json.loads, required=True, help="see `against_trl`")
    settings = parser.parse_args().settings
    os.dup2(2, 1)
    torch.set_num_threads(settings["threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    tokenizer.response_template = qwen3_template  # Hermes calls, as the demo's template writes them
    # The schema that TRL derives of the function is longer than the demo's: the prompt must not be.
    written, schema = "(tool | tojson)", json.dumps(settings["tool_schema"])
    if written not in tokenizer.chat_template:
        raise SystemExit(f"the demo's chat template no longer writes tools with {written}")
    tokenizer.chat_template = tokenizer.chat_template.replace(written, repr(schema))
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    data = Dataset.from_list(
        [{"prompt": r["prompt"], "truth": r["reward_model"]["ground_truth"]} for r in rows]
    )
    control = OneStepPerLine()
    with tempfile.TemporaryDirectory() as directory:
        control.trainer = GRPOTrainer(
            model=settings["model"],
            processing_class=tokenizer,
            reward_funcs=right_answer,
            tools=[calculator],
            train_dataset=data,
            callbacks=[control],
            args=GRPOConfig(output_dir=directory, **settings["grpo"]),
        )
        control.trainer.train()


if __name__ == "__main__":
    main()
