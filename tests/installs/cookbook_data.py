"""Data sets that the cookbook's recipes ask the hub for, in folders of these names.

`datasets` and `transformers` read a folder that has the name which they are asked for. So a recipe
that is started beside these folders needs no hub, and nothing of it is changed. The rows are sums
of two digits, 6 to 8, in the columns of the data set whose name they have.
"""

import json
import random
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

BOXED = " Provide a numerical answer without units, written inside \\boxed{}."
# What rl_loop shows its model first.
SHOWN = (
    "How many r's are in strawberry?" + BOXED,
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r "
    "9) r 10) y. We have r's at positions 3, 8, and 9. \\boxed{3}",
)
# The environment of verifiers that is named reverse-text, with data of its own.
ENVIRONMENT = """\
import verifiers as vf
from datasets import Dataset


def load_environment(**_):
    rows = [{"question": f"Say {n % 10} twice.", "answer": f"{n % 10}{n % 10}"} for n in range(64)]

    async def is_right(completion, answer):
        return float(completion[-1]["content"].strip() == answer)

    async def has_digit(completion, answer):
        return float(answer[0] in completion[-1]["content"])

    rubric = vf.Rubric(funcs=[is_right, has_digit], weights=[0.8, 0.2])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
"""


def _write(file: Path, rows: Iterable[Mapping[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _chat(*texts: str) -> list[Mapping[str, str]]:
    return [
        {"role": ("user", "assistant")[number % 2], "content": text}
        for number, text in enumerate(texts)
    ]


def make_data(folder: Path, model: Path, name: str, rows: int = 512) -> None:
    """Writes the data sets, and the model's tokenizer by the name that clients call it."""
    shutil.copytree(model, folder / name, ignore=shutil.ignore_patterns("*.safetensors"))
    chance = random.Random(0)
    sums = [(a := chance.randrange(7), chance.randrange(6, 9) - a) for _ in range(rows)]
    asked = [f"What is {a} + {b}?" for a, b in sums]
    totals = [a + b for a, b in sums]
    pairs: Sequence[tuple[str, int]] = list(zip(asked, totals, strict=True))
    _write(
        folder / "HuggingFaceH4/no_robots/train.jsonl",
        ({"messages": _chat(*SHOWN, text + BOXED, f"\\boxed{{{n}}}")} for text, n in pairs),
    )
    gsm8k = folder / "openai/gsm8k"
    for split in ("train", "test"):  # what supervised training leaves to be learned
        _write(
            gsm8k / f"main/{split}.jsonl",
            (
                {"question": f"What is {a} + {7 - a}?", "answer": "It is 7.\n#### 7"}
                for a, _ in sums
            ),
        )
    (gsm8k / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: "
        "main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n"
    )
    for split in ("train", "test"):
        _write(
            folder / f"Anthropic/hh-rlhf/{split}.jsonl",
            (
                {
                    "chosen": f"\n\nHuman: {text}\n\nAssistant: {n}",
                    "rejected": f"\n\nHuman: {text}\n\nAssistant: no",
                }
                for text, n in pairs
            ),
        )
    _write(
        folder / "zwhe99/DeepMath-103K/train.jsonl", ({"question": text + BOXED} for text in asked)
    )
    rubric = {
        "rubric_str": "Is it short?",
        "extraction_regex": "(\\d+)",
        "grader_output_format_instruction": "Answer with 0 or 1.",
    }
    for split in ("train", "test"):
        _write(
            folder / f"rubric_{split}.jsonl",
            ({"convo": _chat(text), "rubric_items": [rubric]} for text in asked[:64]),
        )
    (folder / "reverse_text.py").write_text(ENVIRONMENT)


if __name__ == "__main__":
    make_data(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
