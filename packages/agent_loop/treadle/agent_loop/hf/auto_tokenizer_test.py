"""A tokenizer is the one that `AutoTokenizer` loads, whatever the files say of the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from treadle.agent_loop.hf.auto_tokenizer import load_tokenizer


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    pre: Any = tokenizer  # the stubs of the library forbid to set what it lets set
    pre.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pre.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template="{{ messages }}"
    ).save_pretrained(str(folder))


def _shown(tokenizer: Any) -> tuple[object, ...]:
    return (
        type(tokenizer),
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.name_or_path,
    )


@pytest.mark.parametrize(
    "named", ["Qwen2Tokenizer", "LlamaTokenizerFast", "TokenizersBackend", None]
)
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "torch_dtype": "bfloat16"},
        {"model_type": "llama"},  # LlamaTokenizer is wrong for this vocabulary
        {"model_type": "deepseek_v3"},  # its tokenizers name a wrong class
        {"model_type": "mistral", "layer_types": ["full_attention"], "num_hidden_layers": 1},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "qwen2", "tokenizer_class": "GPT2Tokenizer"},
        {"model_type": "of_mine", "auto_map": {}},
        {},
        None,
    ],
)
def test_a_tokenizer_is_loaded_as_by_auto_tokenizer(
    tmp_path: Path, named: str | None, config: dict[str, object] | None
) -> None:
    _write_tokenizer(tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert _shown(load_tokenizer(tmp_path)) == _shown(expected)
