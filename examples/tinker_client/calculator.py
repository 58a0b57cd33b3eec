"""The demo's task, learned by the official client of Tinker's API alone: see README.md."""

import json
import operator
import re
import sys
from pathlib import Path

import tinker
from tinker import types
from transformers import AutoTokenizer

TOOL = {
    "name": "calculator",
    "description": "Evaluate arithmetic.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}
TURN = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
CALL = re.compile(r'"expression": "(\d+) ?([-+*]) ?(\d+)"')
COMPUTE = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ROWS, SAMPLES = 16, 8


def rollouts(sampler, tokenizer, prompts, answers):
    """Returns a group of (ids, log-probabilities, sampled or not, reward) for each prompt."""
    params = types.SamplingParams(max_tokens=48, temperature=1.0)

    def sample(ids, count):
        return sampler.sample(types.ModelInput.from_ints(ids), count, params)

    firsts = [sample(ids, SAMPLES) for ids in prompts]
    started = []
    for ids, first in zip(prompts, firsts, strict=True):
        for turn in first.result().sequences:
            text, nothing = tokenizer.decode(turn.tokens), [0.0] * len(ids)
            mask = [0.0] * len(ids) + [1.0] * len(turn.tokens)
            so_far, logprobs = [*ids, *turn.tokens], [*nothing, *turn.logprobs]
            if call := CALL.search(text):
                value = COMPUTE[call[2]](int(call[1]), int(call[3]))
                seen = tokenizer.encode(TURN.format(value), add_special_tokens=False)
                so_far += seen
                logprobs += [0.0] * len(seen)
                mask += [0.0] * len(seen)
                started.append((so_far, logprobs, mask, sample(so_far, 1)))
            else:
                started.append((so_far, logprobs, mask, text))
    ended = []
    for number, (ids, logprobs, mask, last) in enumerate(started):
        text = last
        if not isinstance(last, str):
            turn = last.result().sequences[0]
            ids, text = [*ids, *turn.tokens], tokenizer.decode(turn.tokens)
            logprobs, mask = [*logprobs, *turn.logprobs], mask + [1.0] * len(turn.tokens)
        found = re.findall(r"#### (-?\d+)", text)
        ended.append((ids, logprobs, mask, float(found == [answers[number // SAMPLES]])))
    return [ended[start : start + SAMPLES] for start in range(0, len(ended), SAMPLES)]


def datum(ids, logprobs, mask, advantage):
    """Returns a trajectory as the loss takes it: one position for each token but the first."""
    inputs = {"logprobs": logprobs[1:], "advantages": [advantage * flag for flag in mask[1:]]}
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], **inputs},
    )


def main(rows_file: str, steps: int) -> None:
    """Trains, and prints the mean reward of each step."""
    rows = [json.loads(line) for line in Path(rows_file).read_text().splitlines()]
    training = tinker.ServiceClient().create_lora_training_client("demo:calculator", rank=32)
    training = training.result()
    tokenizer = AutoTokenizer.from_pretrained(training.get_info().model_data.tokenizer_id)
    for step in range(steps):
        batch = [rows[(step * ROWS + number) % len(rows)] for number in range(ROWS)]
        prompts = [
            tokenizer.apply_chat_template(
                row["prompt"],
                tools=[{"type": "function", "function": TOOL}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for row in batch
        ]
        answers = [row["reward_model"]["ground_truth"] for row in batch]
        sampler = training.save_weights_and_get_sampling_client()
        groups = rollouts(sampler, tokenizer, prompts, answers)
        data = []
        for group in groups:
            mean = sum(reward for *_, reward in group) / SAMPLES
            data += [datum(*rest, r - mean) for *rest, r in group if r != mean]
        if data:
            training.forward_backward(data, "importance_sampling")
            training.optim_step(types.AdamParams(learning_rate=2e-3, grad_clip_norm=1.0)).result()
        rewards = [reward for group in groups for *_, reward in group]
        print(f"step {step + 1}: reward {sum(rewards) / len(rewards):.3f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
