"""Tiny models and batches for tests: random, reproducible, in a folder that the test chooses."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from treadle.policy.client.types import TrainSequence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transformers import PreTrainedModel

VOCAB: Final = 509
"""A prime: divisible by no parallel size, so that padding of the vocabulary is always at work."""

LENGTHS: Final = (18, 41, 9, 64, 33, 26, 50, 12)

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "mistral": {"sliding_window": 24},
    "phi3": {"sliding_window": 40, "partial_rotary_factor": 0.75},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": True},
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "sliding_window": 20,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}
"""Settings of tiny models, so that each variant of a block is at work."""


def write_model(
    folder: Path, model_type: str = "qwen2", *, tied: bool = True, **others: Any
) -> PreTrainedModel:
    """Writes a random model of 4 layers and 64 hidden units, and returns it.

    Norms and biases are random too, so that none of them can be left out unnoticed. `others` are
    more settings of its config.
    """
    import transformers

    config: Any = transformers.CONFIG_MAPPING[model_type]
    models: Any = transformers.AutoModelForCausalLM
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "pad_token_id": None,  # transformers gives the padding id no gradient
        "eos_token_id": 1,
        **SETTINGS.get(model_type, {}),
        **copy.deepcopy(others),  # transformers writes into dictionaries that it is given
    }
    torch.manual_seed(0)
    model: PreTrainedModel = models.from_config(
        config(**settings, tie_word_embeddings=tied), attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(3.0)
    model.train(False)
    model.save_pretrained(folder)
    return model


def sequences(
    lengths: Sequence[int] = LENGTHS, *, vocab: int = VOCAB, seed: int = 7
) -> list[TrainSequence]:
    """Random sequences: a prompt, sampled tokens with a gap in the mask, an advantage each."""
    draw = random.Random(seed)
    result = []
    for length in lengths:
        prompt = max(1, length // 3)
        gap = range(length // 2, length // 2 + length // 8)
        result.append(
            TrainSequence(
                ids=tuple(draw.randrange(vocab) for _ in range(length)),
                loss_mask=tuple(t >= prompt and t not in gap for t in range(length)),
                advantages=draw.gauss(0.0, 1.0),
                rollout_logprobs=tuple(draw.gauss(-6.2, 0.1) for _ in range(length)),
            )
        )
    return result


def with_masks(batch: Sequence[TrainSequence], *, seed: int = 7) -> list[TrainSequence]:
    """Returns the sequences with random sampling masks of every form; every fifth has none."""
    draw = random.Random(seed)

    def mask() -> bytes:
        listed = bytes(draw.randint(1, 99) for _ in range(draw.randrange(4)))
        far = bytes([128 | draw.randrange(128), 1]) if draw.random() < 0.5 else b""
        bits = b"\x00" + draw.randbytes(VOCAB // 8)
        return draw.choice([b"", b"\x00", listed + far, listed + far, bits])

    return [
        replace(s, sampling_masks=tuple(mask() for _ in s.ids) if number % 5 else ())
        for number, s in enumerate(batch)
    ]


def forked_sequences(*, groups: int = 3, seed: int = 7) -> list[TrainSequence]:
    """Random sequences that begin alike: groups of a prompt, samples that part again and again.

    All groups begin with the same ids, as after one system prompt; some samples are equal, or the
    beginning of another.
    """
    draw = random.Random(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB) for _ in range(count))

    start = ids(draw.randrange(12))
    result = []
    for _ in range(groups):
        prompt = start + ids(draw.randint(6, 25))
        stems = [prompt]
        for _ in range(draw.randint(2, 6)):
            stem = draw.choice(stems)
            path = stem + ids(draw.choice((0, 1, 6, 18)))
            stems.append(path)
            path = path if len(path) > len(prompt) + 1 else path + ids(2)
            result.append(
                TrainSequence(
                    ids=path,
                    loss_mask=(
                        *(t >= len(prompt) and draw.random() < 0.8 for t in range(len(path) - 1)),
                        True,
                    ),
                    advantages=draw.gauss(0.0, 1.0),
                    rollout_logprobs=tuple(draw.gauss(-6.2, 0.1) for _ in path),
                )
            )
    draw.shuffle(result)
    return result
