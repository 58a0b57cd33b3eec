"""Makes a tiny model that sees, warm-started on drawings: a Qwen2.5-VL with random weights.

    python -m visual_questions.make_model --out visual_questions/model      (in examples/)

The model learns from demonstrations of two habits. Half of them answer rightly. The other half
always give the first possible answer, whatever the drawing shows. So the model can see, and too
often does not look, which is left for reinforcement learning to teach.

Invariant: with one seed and one number of threads, one machine makes the same model again.
"""

from __future__ import annotations

import argparse
import io
import logging
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from visual_questions.shapes import ANSWERS, SIDE, Question, draw
from warm_start.tokenizer import (
    CHAT_TEMPLATE_PATH,
    END_OF_TEXT,
    IM_END,
    IM_START,
    TOOL_TOKENS,
)

__all__ = ["main", "make_model", "write_blank_model"]

VISION_TOKENS: Final = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_VOCAB_SIZE: Final = 512
_PATCH_SIZE: Final = 14
_BATCH: Final = 32
_LR: Final = 2e-3
_IGNORED: Final = -100  # A label that transformers leaves out of the loss.
_SHOW: Final = """\
{%- macro shown(body) -%}
    {%- if body is string %}{{ body }}
    {%- else %}
        {%- for part in body %}
            {%- if part.type == 'text' %}{{ part.text }}
            {%- else %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro -%}
"""
"""The part of the template that Qwen2.5-VL has and the text models' lacks."""

_log = logging.getLogger("visual_questions.make_model")


def chat_template() -> str:
    """Returns the template of the text demos, for contents with images."""
    text = CHAT_TEMPLATE_PATH.read_text(encoding="utf-8")
    return _SHOW + text.replace("~ body ~", "~ shown(body) ~")


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = (END_OF_TEXT, IM_START, IM_END, *VISION_TOKENS)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE - len(TOOL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in specials],
        show_progress=False,
    )
    words = [*ANSWERS, *(answer for answers in ANSWERS.values() for answer in answers)]
    texts = ["system\nYou are a helpful assistant. user assistant", *words] * 50
    tokenizer.train_from_iterator([*texts, chat_template().replace(r"\n", "\n")], trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in TOOL_TOKENS]
    )
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT, model_max_length=1024
    )
    wrapped.chat_template = chat_template()
    return wrapped


def write_blank_model(directory: Path, *, seed: int = 0, max_ids: int = 16) -> None:
    """Writes a model with random weights, its tokenizer and its image processor.

    Args:
        directory: A new directory.
        seed: Seed of the weights.
        max_ids: Larger images are shrunk to this number of placeholder ids.
    """
    tokenizer = _tokenizer()
    ids = tokenizer.get_vocab()
    torch.manual_seed(seed)
    config: Any = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": _VOCAB_SIZE,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 96,
            "patch_size": _PATCH_SIZE,
            "fullatt_block_indexes": [1],
            "window_size": 8 * _PATCH_SIZE,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model: Any = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _processor(max_ids).save_pretrained(directory)


def _processor(max_ids: int) -> Any:
    pixels = (2 * _PATCH_SIZE) ** 2  # Of one id.
    return Qwen2VLImageProcessorPil(
        patch_size=_PATCH_SIZE, size={"shortest_edge": 4 * pixels, "longest_edge": max_ids * pixels}
    )


class _Batches:
    """Makes batches of demonstrations: a prompt with a drawing, and an answer."""

    def __init__(self, tokenizer: Any, processor: Any, rng: random.Random) -> None:
        self._tokenizer, self._processor, self._rng = tokenizer, processor, rng
        self._image_id: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._num_ids = (SIDE // (2 * _PATCH_SIZE)) ** 2

    def batch(self, *, guessed: float) -> dict[str, torch.Tensor]:
        """Returns the inputs of a training step.

        Args:
            guessed: Share of the demonstrations that answer without looking.
        """
        questions = [draw(self._rng) for _ in range(_BATCH)]
        rows = [self._ids(question, guessed) for question in questions]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        shape = (len(rows), length)
        ids = torch.full(shape, self._tokenizer.pad_token_id)
        labels, mask = torch.full(shape, _IGNORED), torch.zeros(shape, dtype=torch.long)
        for row, (prompt, answer) in enumerate(rows):
            stop = len(prompt) + len(answer)
            ids[row, :stop] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : stop] = torch.tensor(answer)
            mask[row, :stop] = 1
        images = [Image.open(io.BytesIO(question.png)) for question in questions]
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": mask,
            "mm_token_type_ids": (ids == self._image_id).long(),
            **self._processor(images=images, return_tensors="pt"),
        }

    def _ids(self, question: Question, guessed: float) -> tuple[list[int], list[int]]:
        answer = question.answer
        if self._rng.random() < guessed:
            answer = ANSWERS[question.text][0]
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        text = text.replace("<|image_pad|>", "<|image_pad|>" * self._num_ids)
        encode = self._tokenizer.encode
        return encode(text), encode(answer + IM_END)


def make_model(directory: Path, *, seed: int = 0, steps: int = 600) -> float:
    """Makes a model in a new directory.

    Args:
        directory: A new directory.
        seed: Seed of the weights and of the demonstrations.
        steps: Number of training steps; the last third has the guesses. 0: random weights.

    Returns:
        The last loss, in nats per token; NaN without steps.

    Raises:
        FileExistsError: `directory` exists.
    """
    directory.mkdir(parents=True)
    write_blank_model(directory, seed=seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory)
    batches = _Batches(tokenizer, _processor(16), random.Random(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01, betas=(0.9, 0.95))
    loss = math.nan
    for step in range(steps):
        rate = _LR * min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = max(rate, _LR / 100)
        output = model(**batches.batch(guessed=0.5 if step >= steps * 2 // 3 else 0.0))
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = output.loss.item()
        if (step + 1) % 50 == 0:
            _log.info("step %d/%d loss %.4f nats", step + 1, steps, loss)
    model.save_pretrained(directory)
    return loss


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Make a tiny model that sees.")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="of weights and demonstrations")
    parser.add_argument(
        "--steps", type=int, default=600, help="number of training steps; 0: random weights"
    )
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stdout)
    _log.setLevel(logging.INFO)
    try:
        make_model(given.out, seed=given.seed, steps=given.steps)
    except FileExistsError as error:
        parser.error(f"--out {given.out}: {error.strerror}; name a directory that does not exist")
    return 0


if __name__ == "__main__":
    sys.exit(main())
