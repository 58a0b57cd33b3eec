"""A demo's tokenizer: a 1,024-entry byte-level BPE in Qwen2's layout, built from our own text.

Invariant: building is a pure function of this package's files, so a rebuild reproduces the shipped
``tokenizer.json`` byte for byte. Digits are single tokens (Qwen2's pre-tokenizer isolates every
digit), which is what lets a small model copy operands. The chat markers and the Hermes tool markers
are added tokens; only the chat markers are special, as in Qwen2.5, so that decoding a completion
keeps ``<tool_call>`` visible to the parser.

The training text is dominated by the tool prompt and the chats of the recipe, so a calculator
prompt costs about 165 tokens, one per word; ``corpus.txt`` adds general words, so that other text
does not fall to bytes.

Example:
    >>> build_tokenizer(recipe).encode("What is 37 + 48?").tokens  # doctest: +SKIP
    ['What', 'Ġis', 'Ġ', '3', '7', 'Ġ+', 'Ġ', '4', '8', '?']
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from warm_start.recipe import Recipe

VOCAB_SIZE: Final = 1024
"""Entries including the added tokens; a multiple of 128, so embeddings shard without padding."""

MAX_POSITIONS: Final = 1024
"""Longest sequence of the demo model, in tokens."""

END_OF_TEXT: Final = "<|endoftext|>"
IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
SPECIAL_TOKENS: Final = (END_OF_TEXT, IM_START, IM_END)
TOOL_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_HERE: Final = Path(__file__).parent
CHAT_TEMPLATE_PATH: Final = _HERE / "chat_template.jinja"
_CORPUS_PATH: Final = _HERE / "corpus.txt"

# Qwen2's split: contractions, words with one leading mark, single digits, punctuation, space.
_SPLIT_PATTERN: Final = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# How often the chat text is repeated against one reading of the corpus: enough for each of its
# pieces to be merged whole before the rarer words of the corpus compete for entries.
_CHAT_REPEATS: Final = 200


def _training_text(recipe: Recipe) -> Iterator[str]:
    chat = (
        CHAT_TEMPLATE_PATH.read_text(encoding="utf-8").replace(r"\n", "\n"),
        json.dumps(recipe.tool.as_schema()),
        *recipe.chat_texts,
    )
    for _ in range(_CHAT_REPEATS):
        yield from chat
    yield _CORPUS_PATH.read_text(encoding="utf-8")


def build_tokenizer(recipe: Recipe) -> Tokenizer:
    """Trains the tokenizer.

    Args:
        recipe: Whose tool and chats are to cost few tokens.

    Returns:
        A tokenizer of exactly ``VOCAB_SIZE`` entries.

    Raises:
        ValueError: If the training text is too small for ``VOCAB_SIZE`` entries.
    """
    added = (*SPECIAL_TOKENS, *TOOL_TOKENS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(recipe), trainer)
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in TOOL_TOKENS]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(
            f"the training text yields {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}; "
            f"add text to {_CORPUS_PATH.name}"
        )
    return tokenizer


def write_tokenizer(directory: Path, recipe: Recipe) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

    Args:
        directory: Where to write; must exist.
        recipe: As for `build_tokenizer`.
    """
    build_tokenizer(recipe).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": MAX_POSITIONS,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = CHAT_TEMPLATE_PATH.read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
