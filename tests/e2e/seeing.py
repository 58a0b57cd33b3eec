"""A tiny model that sees, and squares whose colour it is asked for."""

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import pyarrow
import pyarrow.parquet

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 30),
    "blue": (40, 40, 230),
    "yellow": (230, 220, 30),
}
QUESTION = "<image>Which colour is the square?"
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
]
TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string %}{{- content }}
{%- else %}{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}{%- endif %}
{%- endmacro -%}
{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}{{- show(message.content) }}
{%- for call in message.tool_calls %}{{- call.function.name }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

REWARD = """
def score(trajectory):
    answer = trajectory.messages[-1].content.strip()
    return float(answer == trajectory.task.fields["reward_model"]["ground_truth"])
"""


def write_seeing_model(folder: Path, model_type: str = "qwen2_5_vl") -> None:
    """Writes a random model of 0.2 M parameters; the colours and the question are words of it.

    An embedding stands for 8 by 8 pixels.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = [*COLOURS, "assistant", "user", QUESTION.removeprefix("<image>")]
    backend.train_from_iterator(
        words * 3,
        trainers.BpeTrainer(
            vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
        ),
    )
    tokenizer = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    config: Any = transformers.CONFIG_MAPPING[model_type]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    tower: dict[str, Any] = {"fullatt_block_indexes": [1], "window_size": 16}
    text: dict[str, Any] = {}
    if model_type == "qwen3_vl":
        rope["mrope_interleaved"] = True
        text["head_dim"] = 16
        tower = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    settings = config(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "eos_token_id": 2,
            "pad_token_id": None,
            "bos_token_id": 1,
            "initializer_range": 0.1,
            "rope_parameters": rope,
            **text,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "initializer_range": 0.2,
            **tower,
        },
        image_token_id=5,
        video_token_id=len(tokenizer) - 1,
        vision_start_token_id=3,
        vision_end_token_id=4,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForImageTextToText
    auto.from_config(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor: Any = Qwen2VLImageProcessorPil(
        patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    )
    processor.save_pretrained(folder)


def square(colour: str, draw: random.Random) -> bytes:
    """Returns a PNG of 32 by 24 pixels: a square of a colour, somewhere on grey."""
    image = PIL.Image.new("RGB", (32, 24), (128, 128, 128))
    left, top = draw.randrange(2, 16), draw.randrange(2, 8)
    PIL.ImageDraw.Draw(image).rectangle((left, top, left + 13, top + 13), fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_rows(file: Path, count: int, *, seed: int = 0) -> None:
    """Writes rows of the task, as Parquet."""
    draw = random.Random(seed)
    colours = [draw.choice([*COLOURS]) for _ in range(count)]
    rows = [
        {
            "data_source": "squares",
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": square(colour, draw), "path": None}],
            "reward_model": {"ground_truth": colour},
        }
        for colour in colours
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def write_conversations(file: Path, count: int, *, seed: int = 0) -> None:
    """Writes conversations in which the colour is guessed: they teach the words, not to see."""
    draw = random.Random(seed)
    rows = [
        {
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": draw.choice([*COLOURS])},
            ],
            "images": [{"bytes": square(draw.choice([*COLOURS]), draw), "path": None}],
        }
        for _ in range(count)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def metrics_of(run_dir: Path, name: str, steps: Sequence[int]) -> list[float]:
    """Returns a metric of some steps of a run."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if line["step"] in steps and name in line]
