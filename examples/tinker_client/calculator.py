"""The demo's task, learned by the official client of Tinker's API alone: see README.md."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tinker  # pants: no-infer-dep
from tinker import types  # pants: no-infer-dep
from transformers import AutoTokenizer

PROPERTIES = {"expression": {"type": "string"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["expression"]}
FUNCTION = {"name": "calculator", "description": "Evaluate arithmetic.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
CALL = re.compile(r'"expression": "(\d+ ?[-+*] ?\d+)"')
TURN = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
ROWS, SAMPLES = 16, 8


class Trajectory:
    """The ids of a question and what followed; what was sampled has a mask of 1."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.mask: list[float] = []
        self.text = ""
        self.see(prompt)

    def see(self, ids: Sequence[int]) -> None:
        """Adds ids that were not sampled."""
        self.ids, self.logprobs = self.ids + list(ids), self.logprobs + [0.0] * len(ids)
        self.mask = self.mask + [0.0] * len(ids)

    def take(self, sampled: Any, tokenizer: Any) -> None:
        """Adds a turn of the model."""
        self.ids, self.logprobs = [*self.ids, *sampled.tokens], [*self.logprobs, *sampled.logprobs]
        self.mask, self.text = (
            self.mask + [1.0] * len(sampled.tokens),
            tokenizer.decode(sampled.tokens),
        )

    def datum(self, advantage: float) -> Any:
        """Returns what the loss takes: one position for each id but the first."""
        advantages = [advantage * flag for flag in self.mask[1:]]
        inputs = {"target_tokens": self.ids[1:], "logprobs": self.logprobs[1:]}
        return types.Datum(
            model_input=types.ModelInput.from_ints(self.ids[:-1]),
            loss_fn_inputs=inputs | {"advantages": advantages},
        )


def rollout(sampler: Any, tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[Trajectory]:
    """Returns SAMPLES trajectories of each prompt, with the answers of the calculator."""
    params = types.SamplingParams(max_tokens=48, temperature=1.0)

    def sample(ids: Sequence[int], count: int) -> Any:
        return sampler.sample(types.ModelInput.from_ints(ids), count, params)

    found: list[Trajectory] = []
    waiting: list[tuple[Trajectory, Any]] = []
    for prompt, first in [(prompt, sample(prompt, SAMPLES)) for prompt in prompts]:
        for sampled in first.result().sequences:
            found.append(trajectory := Trajectory(prompt))
            trajectory.take(sampled, tokenizer)
            if call := CALL.search(trajectory.text):
                value = eval(call[1])  # two numbers and an operator, as CALL says
                trajectory.see(tokenizer.encode(TURN.format(value), add_special_tokens=False))
                waiting.append((trajectory, sample(trajectory.ids, 1)))
    for trajectory, last in waiting:
        trajectory.take(last.result().sequences[0], tokenizer)
    return found


def main(rows_file: str, steps: int) -> None:
    """Trains, and prints the mean reward of each step."""
    rows = [json.loads(line) for line in Path(rows_file).read_text().splitlines()]
    training = (
        tinker.ServiceClient().create_lora_training_client("demo:calculator", rank=32).result()
    )
    tokenizer = AutoTokenizer.from_pretrained(training.get_info().model_data.tokenizer_id)
    show: Any = {"tools": [TOOL], "add_generation_prompt": True, "return_dict": False}
    for step in range(steps):
        batch = [rows[(step * ROWS + number) % len(rows)] for number in range(ROWS)]
        prompts: Any = [tokenizer.apply_chat_template(row["prompt"], **show) for row in batch]
        sampler = training.save_weights_and_get_sampling_client()
        trajectories = rollout(sampler, tokenizer, prompts)
        answers = [row["reward_model"]["ground_truth"] for row in batch for _ in range(SAMPLES)]
        rewards = [
            float(re.findall(r"#### (-?\d+)", trajectory.text) == [answer])
            for trajectory, answer in zip(trajectories, answers, strict=True)
        ]
        means = [sum(rewards[i : i + SAMPLES]) / SAMPLES for i in range(0, len(rewards), SAMPLES)]
        advantages = [reward - means[i // SAMPLES] for i, reward in enumerate(rewards)]
        pairs = zip(trajectories, advantages, strict=True)
        if data := [trajectory.datum(a) for trajectory, a in pairs if a]:
            training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=2e-3, grad_clip_norm=1.0)).result()
        sys.stdout.write(f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
