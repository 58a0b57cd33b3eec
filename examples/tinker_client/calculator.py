"""The demo's task, learned by the official client of Tinker's API alone: see README.md."""

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tinker  # pants: no-infer-dep
from tinker import types  # pants: no-infer-dep
from transformers import AutoTokenizer

ROWS, SAMPLES, PARAMS = 16, 8, types.SamplingParams(max_tokens=48, temperature=1.0)
ASKS: Any = {"type": "object", "properties": {"expression": {"type": "string"}}}
ASKS |= {"required": ["expression"]}
TOOL = {"name": "calculator", "description": "Evaluate arithmetic.", "parameters": ASKS}
SHOW: Any = {"tools": [{"type": "function", "function": TOOL}], "add_generation_prompt": True}
CALL = re.compile(r'"expression": "(\d+ ?[-+*] ?\d+)"')
USER, END = "\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"

rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
training = tinker.ServiceClient().create_lora_training_client("demo:calculator", rank=32).result()
tokenizer: Any = AutoTokenizer.from_pretrained(training.get_info().model_data.tokenizer_id)


def finish(sampler: Any, prompt: list[int], answer: str, first: Any) -> tuple[Any, float]:
    """Returns a trajectory, as ids with log-probability and mask, and whether it is right."""
    steps = [(token, 0.0, 0.0) for token in prompt]
    steps += [(token, p, 1.0) for token, p in zip(first.tokens, first.logprobs, strict=True)]
    if call := CALL.search(tokenizer.decode(first.tokens)):
        said = f"<tool_response>\n{eval(call[1])}\n</tool_response>"  # two numbers, an operator
        steps += [(token, 0.0, 0.0) for token in tokenizer.encode(USER + said + END)]
        seen = types.ModelInput.from_ints([token for token, _, _ in steps])
        last = sampler.sample(seen, 1, PARAMS).result().sequences[0]
        steps += [(token, p, 1.0) for token, p in zip(last.tokens, last.logprobs, strict=True)]
    text = tokenizer.decode([token for token, _, mask in steps if mask])
    return steps, float(re.findall(r"#### (-?\d+)", text) == [answer])


for step in range(int(sys.argv[2])):
    sampler, data, total = training.save_weights_and_get_sampling_client().result(), [], 0.0
    batch = [rows[(step * ROWS + number) % len(rows)] for number in range(ROWS)]
    prompts = [tokenizer.apply_chat_template(row["prompt"], **SHOW).input_ids for row in batch]
    asked = [sampler.sample(types.ModelInput.from_ints(p), SAMPLES, PARAMS) for p in prompts]
    for prompt, row, future in zip(prompts, batch, asked, strict=True):
        firsts, answer = future.result().sequences, row["reward_model"]["ground_truth"]
        with ThreadPoolExecutor(SAMPLES) as pool:
            group = list(pool.map(partial(finish, sampler, prompt, answer), firsts))
        total += (mean := sum(reward for _, reward in group) / SAMPLES) / ROWS
        for steps, reward in group:
            ids, logprobs, mask = map(list, zip(*steps, strict=True))
            inputs = {"target_tokens": ids[1:], "logprobs": logprobs[1:]}
            inputs["advantages"] = [(reward - mean) * each for each in mask[1:]]
            data += [types.Datum(types.ModelInput.from_ints(ids[:-1]), inputs)] * (reward != mean)
    if data:
        training.forward_backward(data, "importance_sampling")
        training.optim_step(types.AdamParams(learning_rate=2e-3, grad_clip_norm=1.0)).result()
    sys.stdout.write(f"step {step + 1}: reward {total:.3f}\n")
