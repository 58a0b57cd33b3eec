"""Writes train.jsonl and val.jsonl: questions about a shop, with the numbers that answer them."""

import json
import operator
import random

# The demo model knows this sentence; a larger model follows any.
SYSTEM = "Solve the problem. End with #### <answer>."
WORDINGS = (
    ("A ticket costs {a} coins. What do {b} tickets cost?", operator.mul),
    ("There are {a} boxes with {b} pens each. How many pens are there?", operator.mul),
    ("Tom has {a} apples and buys {b} more. How many apples does he have?", operator.add),
    ("Anna has {a} books and gives away {b}. How many books are left?", operator.sub),
)


def row(index: int, a: int, b: int) -> dict[str, object]:
    """Returns one row: what the model is asked, and what the reward compares its answer with."""
    question, answer = WORDINGS[index % len(WORDINGS)]
    return {
        "data_source": "my_task",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": question.format(a=a, b=b)},
        ],
        "reward_model": {"style": "rule", "ground_truth": str(answer(a, b))},
    }


pairs = [(a, b) for a in range(11, 100) for b in range(2, a)]
random.Random(0).shuffle(pairs)
# No pair is in both files, so validation measures what was learned, not what was remembered.
for name, chosen in {"train": pairs[:192], "val": pairs[192:240]}.items():
    with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
        for index, (a, b) in enumerate(chosen):
            file.write(json.dumps(row(index, a, b)) + "\n")
